"""The control plane of Poolwright: operator, router, local mode and command line. Never imports torch."""
