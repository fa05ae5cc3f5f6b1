"""Keys and tokens of one pool, all derived, so that applying twice writes the same bytes and nothing is read back."""

import hashlib
import hmac

_KEY_BYTES = 32


def pool_key(root_secret: bytes, pool_uid: str) -> bytes:
    """HMAC-SHA256(root secret, pool uid): 32 bytes. Raises ValueError for a root secret under 16 bytes."""
    if len(root_secret) < 16:
        raise ValueError("the root secret must hold at least 16 bytes")
    return hmac.new(root_secret, b"poolwright pool key\0" + pool_uid.encode(), hashlib.sha256).digest()


def parse_key(text: str) -> bytes:
    """The pool key as engines and routers get it in their environment: 64 hex digits."""
    try:
        key = bytes.fromhex(text.strip())
    except ValueError:
        key = b""
    if len(key) != _KEY_BYTES:
        raise ValueError("the pool key must be 64 hex digits")
    return key


def admin_token(key: bytes) -> str:
    """Bearer token of the admin port."""
    return mac(key, "admin token")


def mac(key: bytes, text: str) -> str:
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def same(left: str, right: str) -> bool:
    return hmac.compare_digest(left.encode(), right.encode())
