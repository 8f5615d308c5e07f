"""The files that deploy a fleet: Kubernetes manifests, Helm values, an endpoint picker.

It may import `simulator`. Start with `deployment.py`.
"""
