# kvplane: see README.md. `make help` lists what there is.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: protos
protos: ## Regenerate the gRPC stubs (checked in; tests compare them)
	$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=services --pyi_out=services --grpc_python_out=services $$(find protos -name '*.proto' | sort)
	find services/kvplane/api -type d -exec touch {}/__init__.py \;
