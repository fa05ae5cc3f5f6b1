"""The fixtures that hand a cluster to tests. Owns when a test is skipped and why."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed import bed, binaries, images, prepare
from testbed.bed import Bed, NodeBed
from testbed.images import ProjectImages
from testbed.lent import LentCluster, lent_cluster
from testbed.progress import Unavailable


@pytest.fixture(scope="session")
def api_server() -> Iterator[Bed | LentCluster]:
    """A real control plane without nodes: etcd, API server, controller manager, scheduler. One for the whole run."""
    try:
        prepare.need("control-plane")
        cluster = lent_cluster() or bed.start()
    except Unavailable as reason:
        pytest.skip(str(reason))
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def own_api_server() -> Iterator[Bed]:
    """Like `api_server`, for one module alone: for tests that make, change and remove what the whole cluster shares."""
    try:
        prepare.need("control-plane")
        cluster = bed.start()
    except Unavailable as reason:
        pytest.skip(str(reason))
    yield cluster
    cluster.close()


@pytest.fixture(scope="session")
def node_cluster() -> Iterator[NodeBed]:
    """A real cluster with one node, in namespaces of its own. One for the whole run."""
    try:
        prepare.need("node-packages", "node")
        cluster = bed.start_with_node()
    except Unavailable as reason:
        pytest.skip(str(reason))
    yield cluster
    cluster.close()


@pytest.fixture(scope="session")
def project_images() -> ProjectImages:
    """The images of this checkout, as archives for `node_cluster.load_image`."""
    try:
        prepare.need("images")
        return images.project_images()
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def helm() -> Path:
    """The helm program."""
    try:
        prepare.need("helm")
        return binaries.helm()
    except Unavailable as reason:
        pytest.skip(str(reason))
