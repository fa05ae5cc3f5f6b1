"""Every name that crosses a process boundary: labels, annotations, environment, headers, ports."""

GROUP = "poolwright.dev"
VERSION = "v1alpha1"
KIND = "InferencePool"
PLURAL = "inferencepools"

# On pods. The role label is in no selector of any workload object.
LABEL_ROLE = f"{GROUP}/role"
LABEL_POOL = f"{GROUP}/pool"
LABEL_MACHINE_CLASS = f"{GROUP}/machine-class"
LABEL_COMPONENT = f"{GROUP}/component"  # engine | router
ANNOTATION_ROLE_EPOCH = f"{GROUP}/role-epoch"
ANNOTATION_ROLE_SINCE = f"{GROUP}/role-since"
ANNOTATION_MOVE = f"{GROUP}/move"
ANNOTATION_ROUTING = f"{GROUP}/routing"  # what routers are told of a machine beside its role

# On nodes, by whoever knows the network: what KV has to pass between machines.
LABEL_KV_ISLAND = f"{GROUP}/kv-island"  # machines of one have the fast links between them
LABEL_KV_INSIDE_GBPS = f"{GROUP}/kv-inside-gbps"
LABEL_KV_OUTSIDE_GBPS = f"{GROUP}/kv-outside-gbps"

COMPONENT_ENGINE = "engine"
COMPONENT_ROUTER = "router"

# Engine ports: clients and router, operator (bearer token), prefill requests and KV.
API_PORT = 8000
ADMIN_PORT = 8001
KV_PORT = 9000
ROUTER_PORT = 8080

ENV_ROLE = "POOLWRIGHT_ROLE"
ENV_ROLE_EPOCH = "POOLWRIGHT_ROLE_EPOCH"
ENV_POD_UID = "POOLWRIGHT_POD_UID"
ENV_POD_IP = "POOLWRIGHT_POD_IP"
ENV_POD_NAME = "POOLWRIGHT_POD_NAME"
ENV_POOL = "POOLWRIGHT_POOL"
ENV_POOL_NAMESPACE = "POOLWRIGHT_POOL_NAMESPACE"
ENV_POOL_KEY = "POOLWRIGHT_POOL_KEY"  # 64 hex digits; see keys.pool_key
ENV_API_KEY = "POOLWRIGHT_API_KEY"  # what clients of an engine that runs alone must bring
ENV_ROOT_SECRET = "POOLWRIGHT_ROOT_SECRET"

# Router → engine. A router drops these from what a client sends.
HEADER_PREFIX = "x-poolwright-"
HEADER_MACHINE_UID = "x-poolwright-machine-uid"  # 421 where it is not the engine's own
# Its first token would be late in any case, so it is served after others: "1". To a client: the reason, one word.
HEADER_RELEGATED = "x-poolwright-relegated"
HEADER_REFUSED = "x-poolwright-refused"  # to a client: why it was turned away, one word
HEADER_PROMPT_MACHINE = "x-poolwright-prompt-machine"  # see tickets.PromptMachine

# Router → operator: the work it has outstanding on each machine, in the name of the router that answers.
ROUTER_WORK_PATH = "/outstanding"
HEADER_ROUTER_UID = "x-poolwright-router-uid"

# Metric label names (never the scraper's).
METRIC_POOL = "inference_pool"
METRIC_POOL_NAMESPACE = "inference_pool_namespace"
METRIC_MACHINE_UID = "machine_uid"
METRIC_ROLE = "role"
METRIC_ROUTER_UID = "router_uid"

# Router metrics, all labelled inference_pool, inference_pool_namespace, router_uid.
ROUTER_INFO = "poolwright_router_info"
ROUTER_TTFT = "poolwright_router_ttft_seconds"
ROUTER_TBT = "poolwright_router_tbt_seconds"
ROUTER_SECOND_TOKEN = "poolwright_router_second_token_seconds"
ROUTER_TPOT = "poolwright_router_tpot_seconds"
ROUTER_ARRIVALS = "poolwright_router_arrivals"  # counter, exposed with _total
ROUTER_REQUESTS = "poolwright_router_requests"  # counter by code, exposed with _total
ROUTER_RELEGATED = "poolwright_router_relegated"  # counter by reason, exposed with _total
ROUTER_RELEGATION_THRESHOLD = "poolwright_router_relegation_threshold_ratio"
ROUTER_REFUSED = "poolwright_router_refused"  # counter by reason, exposed with _total
ROUTER_IN_FLIGHT = "poolwright_router_in_flight_requests"
ROUTER_OLDEST_WAITING = "poolwright_router_oldest_waiting_seconds"
ROUTER_PROMPT_TOKENS = "poolwright_router_prompt_tokens"  # counter, estimated from bytes until usage arrives
ROUTER_OUTPUT_TOKENS = "poolwright_router_output_tokens"  # counter
