# sessions are told apart by the header x-session-id
vllm-router --port 8001 --service-discovery k8s --k8s-port 8000 --k8s-label-selector app.kubernetes.io/name=vllm --routing-logic session --session-key x-session-id
