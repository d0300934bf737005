# Serves a published engine on an NVIDIA GPU. The engine is mounted; API keys are a secret file, one name:secret a line.
#
#   docker build --file docker/cuda.Dockerfile --tag toolkit:cuda .
#   docker run --gpus 1 --publish 8000:8000 --volume "$PWD/engine:/engine:ro" --volume "$PWD/keys:/run/secrets/api-keys:ro" toolkit:cuda
#
# torch's wheels bring CUDA's libraries; the host brings the driver. Triton compiles its launchers with a C compiler,
# so there is one here. An engine is tied to its GPU and to torch's and Triton's versions: build it in this image.

FROM python:3.12.11-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md ./
COPY calib ./calib
COPY engines ./engines
COPY evals ./evals
COPY toolkit ./toolkit
COPY ui ./ui
RUN python -m venv /opt/toolkit \
    && /opt/toolkit/bin/pip install --no-cache-dir --constraint constraints.txt ".[gpu]"

FROM python:3.12.11-slim-bookworm
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 toolkit
COPY --from=build /opt/toolkit /opt/toolkit
ENV PATH=/opt/toolkit/bin:$PATH \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER toolkit
WORKDIR /home/toolkit
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["toolkit"]
CMD ["serve", "/engine", "--host", "0.0.0.0", "--port", "8000", "--allow-host", "*", "--api-keys", "/run/secrets/api-keys", "--drain", "25", "--offline"]
