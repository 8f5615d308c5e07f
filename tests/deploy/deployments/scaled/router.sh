# production-stack's router has no least_kv: this is roundrobin
vllm-router --port 8001 --service-discovery k8s --k8s-port 8000 --k8s-label-selector app.kubernetes.io/name=vllm --routing-logic roundrobin
