"""The files that deploy a fleet: `vllm serve`, Kubernetes manifests, Helm values.

It may import `simulator`. Start with `deployment.py`.
"""
