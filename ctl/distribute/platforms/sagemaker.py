"""Topology on SageMaker: SM_HOSTS lists the machines, SM_CURRENT_HOST is this one."""

from collections.abc import Mapping

from ctl.distribute.platforms import variables
from ctl.distribute.topology import Topology
from ctl.errors import UsageError

_PORT = 8890  # that of SageMaker's TensorFlow toolkit


def read(environ: Mapping[str, str]) -> Topology | None:
    """Returns the topology from SM_HOSTS, or None if it is not set. Raises UsageError."""
    text = environ.get("SM_HOSTS", "").strip()
    current_host = environ.get("SM_CURRENT_HOST", "").strip()
    if not text:
        if current_host:
            raise UsageError(
                f"SM_CURRENT_HOST is {current_host!r}, but SM_HOSTS is not set; expected a list such as "
                '["algo-1", "algo-2"]. For a process that trains alone, unset SM_CURRENT_HOST.'
            )
        return None
    try:
        hosts = variables.json_of(text)
    except ValueError:
        hosts = None
    if not isinstance(hosts, list) or not hosts or not all(isinstance(h, str) for h in hosts):
        raise UsageError(f'SM_HOSTS is {text[:80]!r}; expected a list such as ["algo-1", "algo-2"].')
    if current_host not in hosts and len(hosts) > 1:
        raise UsageError(
            f"SM_CURRENT_HOST is {current_host!r}; expected one of SM_HOSTS, {', '.join(hosts)}."
        )
    first = variables.port(environ, _PORT)
    index = hosts.index(current_host) if current_host in hosts else 0
    addresses = [f"{host}:{first}" for host in hosts]
    sources = "SM_HOSTS", "SM_CURRENT_HOST"
    return variables.workers("SageMaker", sources, addresses, index, port_variable=variables.PORT_VARIABLE)
