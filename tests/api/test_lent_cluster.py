"""A lent cluster is used only when named, refused where it already has something of ours, and left as it was."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed import bed, lent, prepare
from testbed.bed import Bed
from testbed.progress import Unavailable

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def lender() -> Iterator[Bed]:
    """A cluster apart from the run's own, on which other tests install what these must not meet."""
    try:
        prepare.need("control-plane")
        cluster = bed.start()
    except Unavailable as reason:
        pytest.skip(str(reason))
    yield cluster
    cluster.close()


RELEASE = {
    "apiVersion": "v1",
    "kind": "Secret",
    "metadata": {"name": "theirs", "labels": {"app.kubernetes.io/part-of": "poolwright"}},
}


def test_nothing_is_lent_by_the_default_context(lender: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(lent.VARIABLE, raising=False)
    monkeypatch.setenv("KUBECONFIG", str(lender.kubeconfig))
    assert lent.lent_cluster() is None


def test_file_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(lent.VARIABLE, str(tmp_path / "none"))
    with pytest.raises(Unavailable, match="is no file"):
        lent.lent_cluster()


def test_namespaces_made_are_removed_again(lender: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(lent.VARIABLE, str(lender.kubeconfig))
    cluster = lent.lent_cluster()
    assert cluster is not None
    assert cluster.url == lender.url
    name = cluster.new_namespace()
    cluster.close()
    lender.kubectl("wait", "--for=delete", f"namespace/{name}", "--timeout=30s")


def test_cluster_with_a_release_is_refused(lender: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    namespace = lender.new_namespace()
    lender.kubectl("create", "-n", namespace, "-f", "-", input=json.dumps(RELEASE))
    monkeypatch.setenv(lent.VARIABLE, str(lender.kubeconfig))
    with pytest.raises(Unavailable, match="already"):
        lent.lent_cluster()
    lender.kubectl("delete", "secret", "theirs", "-n", namespace)
