"""Writes an image of one program as an OCI archive. Owns that format, for an image too small to need a builder."""

import hashlib
import io
import json
import platform
import tarfile
from pathlib import Path

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def write_archive(archive: Path, name: str, program: Path) -> None:
    """An image of nothing but `program`, its entry point, run as a user that is not root."""
    layer = _tar({program.name: program.read_bytes()}, mode=0o755)
    layer_digest = hashlib.sha256(layer).hexdigest()
    config = {
        "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": {"Entrypoint": [f"/{program.name}"], "User": "65532:65532", "WorkingDir": "/"},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer_digest}"]},
    }
    blobs = {"layer": layer, "config": json.dumps(config).encode()}
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": _descriptor("application/vnd.oci.image.config.v1+json", blobs["config"]),
        "layers": [_descriptor("application/vnd.oci.image.layer.v1.tar", layer)],
    }
    blobs["manifest"] = json.dumps(manifest).encode()
    index_entry = _descriptor("application/vnd.oci.image.manifest.v1+json", blobs["manifest"])
    index_entry["annotations"] = {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name}
    files = {f"blobs/sha256/{hashlib.sha256(blob).hexdigest()}": blob for blob in blobs.values()}
    files["oci-layout"] = b'{"imageLayoutVersion": "1.0.0"}'
    files["index.json"] = json.dumps({"schemaVersion": 2, "manifests": [index_entry]}).encode()
    archive.write_bytes(_tar(files, mode=0o644))


def _descriptor(media_type: str, blob: bytes) -> dict[str, object]:
    return {"mediaType": media_type, "digest": f"sha256:{hashlib.sha256(blob).hexdigest()}", "size": len(blob)}


def _tar(files: dict[str, bytes], mode: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), mode
            tar.addfile(entry, io.BytesIO(data))
    return out.getvalue()
