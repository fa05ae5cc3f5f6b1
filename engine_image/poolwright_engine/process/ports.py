"""The engine's ports: a listening socket for each, or why there is none, by the name of its option."""

import errno
import socket

from poolwright_engine.process.config import ConfigError, EngineConfig


def listener(option: str, host: str, port: int) -> socket.socket:
    """Raises ConfigError."""
    try:
        return _listener(host, port)
    except OSError as error:
        raise cannot_listen(option, host, port, error) from error


def cannot_listen(option: str, host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(f"{option}: cannot listen on {host}:{port}: {error.strerror or error}")


def options_taken(config: EngineConfig) -> list[str]:
    """Options of the ports that somebody has now: to whoever asks beside an engine that runs, that is no mistake.
    Raises ConfigError for what no waiting would mend, such as a host that is none of this machine's addresses."""
    taken = []
    for option, port in (("--port", config.port), ("--admin-port", config.admin_port), ("--kv-port", config.kv_port)):
        try:
            _listener(config.host, port).close()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise cannot_listen(option, config.host, port, error) from error
            taken.append(option)
    return taken


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)
