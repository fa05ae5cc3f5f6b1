/* Includes BODY once for each type of element. */

#define ELEMENT float
#define LOAD same_float
#define STORE same_float
#define NAME(operation) operation##_float32
#include BODY
#undef ELEMENT
#undef LOAD
#undef STORE
#undef NAME

#define ELEMENT bfloat16
#define LOAD from_bfloat16
#define STORE to_bfloat16
#define NAME(operation) operation##_bfloat16
#include BODY
