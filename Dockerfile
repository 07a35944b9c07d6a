# Trainer and retrieval service: docker build --build-arg ACCELERATOR=cpu .
# ACCELERATOR=gpu installs JAX with CUDA 13 and FAISS for GPUs; the host needs
# NVIDIA's driver and container toolkit. BASE is any Debian with Python >= 3.11.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
ARG ACCELERATOR=cpu
WORKDIR /searchrl
COPY tools/venv.sh tools/
COPY requirements.txt requirements-gpu.txt ./
RUN case $ACCELERATOR in \
    cpu) sh tools/venv.sh .venv requirements.txt ;; \
    gpu) sh tools/venv.sh .venv requirements-gpu.txt ;; \
    *) echo "ACCELERATOR=$ACCELERATOR: expected cpu or gpu." >&2; exit 1 ;; \
    esac && rm -rf /root/.cache
COPY searchrl_jax searchrl_jax
COPY retrieval retrieval
COPY configs configs
COPY experiments experiments
# Processes run as this user; runs/ is where a volume is mounted.
RUN useradd --create-home --uid 1000 searchrl && install -d -o searchrl runs
USER searchrl
# The second as in Makefile; the third for images that run under the toolkit.
ENV PATH=/searchrl/.venv/bin:$PATH \
    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
CMD ["python", "-m", "searchrl_jax.train", "--help"]
