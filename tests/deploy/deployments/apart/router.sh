# the router hands prompts on; it chooses in turn
vllm-router --port 8001 --service-discovery k8s --k8s-port 8000 --k8s-label-selector app.kubernetes.io/name=vllm --routing-logic disaggregated_prefill --prefill-model-labels apart-prefill --decode-model-labels apart-decode
