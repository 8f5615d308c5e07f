# docker build -t headway . && docker run --rm -v "$PWD:/work" headway run demo
FROM python:3.13-slim
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY headway headway
COPY simulator simulator
COPY calibration calibration
COPY gpu_backend gpu_backend
COPY scenarios scenarios
RUN pip install --no-cache-dir ".[serve,parquet]" && rm -rf /src/*
WORKDIR /work
EXPOSE 8000
ENTRYPOINT ["headway"]
CMD ["--help"]
