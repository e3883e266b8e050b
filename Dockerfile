# docker build --tag cleanba .                                      for the CPU
# docker build --tag cleanba:cuda --build-arg DEVICE=cuda .         for NVIDIA's GPUs
ARG DEVICE=cpu

FROM python:3.11-slim AS cpu

# CUDA's libraries come with the extra; the base image brings what the driver of the host needs.
FROM nvidia/cuda:12.6.3-base-ubuntu24.04 AS cuda
ENV JAX_EXTRA="[cuda12]"
RUN apt-get update && apt-get install --yes --no-install-recommends python3 python3-venv && rm -rf /var/lib/apt/lists/*

FROM ${DEVICE}
RUN apt-get update && apt-get install --yes --no-install-recommends git make && rm -rf /var/lib/apt/lists/*
WORKDIR /cleanba
RUN python3 -m venv /venv
ENV PATH="/venv/bin:$PATH"
COPY requirements.txt .
RUN pip install --no-cache-dir --require-hashes --requirement requirements.txt
COPY pyproject.toml README.md LICENSE ./
COPY cleanba cleanba
COPY examples examples
RUN pip install --no-cache-dir --no-deps --no-build-isolation --editable . && \
    if [ -n "$JAX_EXTRA" ]; then pip install --no-cache-dir "jax$JAX_EXTRA==$(python -c 'import jax; print(jax.__version__)')"; fi
CMD ["cleanba", "doctor"]
