# Serves a published engine on a CPU. The engine is mounted; API keys are a secret file, one name:secret a line.
#
#   docker build --file docker/cpu.Dockerfile --tag toolkit:cpu .
#   docker run --publish 8000:8000 --volume "$PWD/engine:/engine:ro" --volume "$PWD/keys:/run/secrets/api-keys:ro" toolkit:cpu
#
# An engine is tied to its device and to torch's version: build it in this image, on the kind of machine that serves it
# (docker run ... toolkit:cpu build CHECKPOINT --out DIR).

FROM python:3.12.11-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md ./
COPY calib ./calib
COPY engines ./engines
COPY evals ./evals
COPY toolkit ./toolkit
COPY ui ./ui
RUN python -m venv /opt/toolkit \
    && /opt/toolkit/bin/pip install --no-cache-dir --constraint constraints.txt .

FROM python:3.12.11-slim-bookworm
RUN useradd --create-home --uid 10001 toolkit
COPY --from=build /opt/toolkit /opt/toolkit
ENV PATH=/opt/toolkit/bin:$PATH
USER toolkit
WORKDIR /home/toolkit
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["toolkit"]
CMD ["serve", "/engine", "--host", "0.0.0.0", "--port", "8000", "--allow-host", "*", "--api-keys", "/run/secrets/api-keys", "--drain", "25", "--offline"]
