# syntax=docker/dockerfile:1
# CPU:  docker build -t fedjax-ssl .
# CUDA: docker build -t fedjax-ssl:cuda --build-arg EXTRA=cuda12 .    and docker run --gpus all ...
# TPU:  docker build -t fedjax-ssl:tpu --build-arg EXTRA=tpu .        and docker run --privileged --net=host ...
# Run:  mkdir -p runs && docker run --rm -v "$PWD/runs:/home/trainer/runs" fedjax-ssl --workdir=runs/first
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS wheel
# git, for the version comes from its tags.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends git && rm -rf /var/lib/apt/lists/*
COPY . /source
RUN pip wheel --no-cache-dir --no-deps --wheel-dir=/wheels /source

FROM python:${PYTHON}-slim
# An extra of pyproject.toml: cuda12, cuda13, tpu; several with commas between.
ARG EXTRA=""
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(echo /wheels/*.whl)${EXTRA:+[$EXTRA]}"
# The user's number, so that files in a mounted folder belong to who runs it.
ARG USER_ID=1000
RUN useradd --create-home --uid="${USER_ID}" trainer && mkdir /home/trainer/runs && chown trainer /home/trainer/runs
USER ${USER_ID}
WORKDIR /home/trainer
ENTRYPOINT ["fedjax-ssl"]
