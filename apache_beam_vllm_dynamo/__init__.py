"""Large language models over Apache Beam pipelines, on vLLM engines behind NVIDIA Dynamo."""
