"""A real Kubernetes for the tests, on one machine, from source.

Owns how a control plane and a node are built, started, reached and cleaned away.
Refuses to know anything of Poolwright's own resources.

A test uses a `Bed` (bed.py), a handle on files and sockets. Behind it a keeper process (keeper.py) outlives the test
run just long enough to clean up, also when the run is killed; it starts a runner (runner.py), which starts the
components, for a bed with a node inside namespaces of its own.
"""
