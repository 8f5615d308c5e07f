"""Made-up measured runs, for tests."""

from calibration.measured.runs import Run

HEAD = "run_id,source,tier,gpu,tp,model,weight_dtype,engine_version,max_num_seqs,"
HEAD += "max_num_batched_tokens,kv_capacity_tokens,prefix_caching,concurrency,rate_rps,"
HEAD += "n_requests,mean_input_tokens,mean_output_tokens,ttft_mean_ms,tpot_mean_ms,"
HEAD += "per_request_file,notes\n"
FILED = "one,us,calib,NVIDIA H100 80GB HBM3,1,meta-llama/Llama-3.1-8B-Instruct,bf16,v0.11.0,256,"
FILED += "2048,160000,True,,,,,,,,e2e/one__requests.csv,\n"
CLOSED = "two,them,calib,h200_sxm,2,Qwen/Qwen3-32B,fp8,0.12.0,,,,,4,,,1024,64,100,12,,\n"
STRANGE = "bad,them,calib,h200_sxm,1,acme/Secret-9B,,,,,,,4,,,1024,64,100,12,,\n"
REQUESTS = """arrival_s,input_tokens,output_tokens,ttft_s,tpot_s,e2e_s
0,1000,11,0.30,0.010,0.40
1,1000,11,0.05,0.010,0.15
2,1000,11,0.05,0.010,0.15
2.2,1000,1,0.05,,0.05
"""


def run_of(**words: str) -> Run:
    """Make a run of some cells, all others empty."""
    numbers = {k: float(v) for k, v in words.items() if v.replace(".", "", 1).isdigit()}
    return Run({"run_id": "r", **words}, numbers, {})
