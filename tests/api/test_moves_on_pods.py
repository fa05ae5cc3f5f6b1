"""The move of a machine, claim by claim, on pods of a real API server: the same cases as without Kubernetes."""

from collections.abc import AsyncIterator

import pytest

from poolwright.kube import KubeClient
from support.kube_machines_bed import KubeBed
from testbed.bed import Bed

pytest.register_assert_rewrite("support.move_cases")

from support.move_cases import *  # noqa: E402, F403
from support.move_cases import engines as engines  # noqa: E402

pytestmark = pytest.mark.cluster


@pytest.fixture
async def machines_bed(api_server: Bed) -> AsyncIterator[KubeBed]:
    async with await KubeClient.connect(str(api_server.kubeconfig)) as client:
        bed = KubeBed(api_server, client, api_server.new_namespace())
        try:
            yield bed
        finally:
            await bed.close()
