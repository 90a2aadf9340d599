# The image of every service but PostgreSQL: the command line `quota`, as a user without rights.
#   docker build -t quota-ledger . && docker run --rm quota-ledger --help
FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY quota quota
COPY migrations migrations
RUN python -m venv /opt/quota && /opt/quota/bin/pip install --no-cache-dir .

FROM python:3.12-slim
COPY --from=build /opt/quota /opt/quota
RUN groupadd --gid 10001 quota \
    && useradd --uid 10001 --gid 10001 --home-dir /nonexistent --no-create-home --shell /usr/sbin/nologin quota
ENV PATH=/opt/quota/bin:$PATH PYTHONUNBUFFERED=1
USER 10001:10001
ENTRYPOINT ["quota"]
CMD ["--help"]
