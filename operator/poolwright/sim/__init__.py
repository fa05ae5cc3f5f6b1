"""The discrete-event simulator and the planner.

It calls `core` for every decision of ours and holds no formula of its own that the control plane or the engine also
has; it knows no clock, no socket and no Kubernetes.
"""
