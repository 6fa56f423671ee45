# The image of a coordinator and of a site: docker compose --profile site up --build -d (docs/how-to/containers.md)
ARG BASE=docker.io/library/python:3.13-slim-bookworm
FROM ${BASE}

# for pip, such as "--extra-index-url ..." of an index with torch for CPUs only; without it torch brings CUDA
ARG PIP_OPTIONS=""

# nginx is the coordinator's proxy
RUN apt-get update \
    && apt-get install -y --no-install-recommends nginx-light \
    && rm -rf /var/lib/apt/lists/*

COPY pyproject.toml README.md LICENSE constraints.txt /src/
COPY src /src/src
RUN python3 -m venv /opt/fedpews \
    && /opt/fedpews/bin/pip install --no-cache-dir ${PIP_OPTIONS} --constraint /src/constraints.txt \
       "/src[flower,pandas,prometheus]" \
    && rm -rf /src

RUN useradd --uid 10001 --create-home --home-dir /home/fedpews fedpews \
    && mkdir -p /srv/coordinator /srv/app /srv/runs /srv/state /srv/data \
    && chown fedpews:fedpews /srv/coordinator /srv/runs /srv/state

# a read-only container has no other place to write than /tmp and its volumes
ENV PATH=/opt/fedpews/bin:$PATH HOME=/tmp PYTHONDONTWRITEBYTECODE=1 MPLCONFIGDIR=/tmp/matplotlib
USER 10001:10001
WORKDIR /tmp
ENTRYPOINT ["fedpews"]
CMD ["--help"]
