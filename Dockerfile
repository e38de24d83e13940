# The image of every process on a TPU slice: docker build --platform=linux/amd64 -t IMAGE .
FROM python:3.12-slim
ENV PYTHONUNBUFFERED=1
WORKDIR /estr_jax
COPY requirements.txt ./
RUN pip install --no-cache-dir -r requirements.txt 'jax[tpu]'
COPY configs configs
COPY estr_jax estr_jax
COPY experiments experiments
