# The scripts run from the working copy, mounted at /workspace: the image adds only what NVIDIA's lacks.
ARG BASE=nvcr.io/nvidia/pytorch:25.11-py3
# hadolint ignore=DL3006
FROM ${BASE}
RUN PIP_CONSTRAINT='' pip install --no-cache-dir --no-deps tabulate==0.10.0 msgspec==0.22.0 nvidia-ml-py==13.615.71 \
  && PIP_CONSTRAINT='' pip install --no-cache-dir jinja2==3.1.6 matplotlib==3.11.2
WORKDIR /workspace
CMD ["./run_all.sh"]
