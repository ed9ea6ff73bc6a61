# Every target does its own set-up: Python 3.11 or newer (with venv) and make are all it takes.

PY ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# What pip does is shown to people, who would wait for a minute without a word, and to no log.
PIP = $(RUN) -m pip install --disable-pip-version-check $$([ -t 1 ] || echo --quiet)
STAMP := $(VENV)/.installed
BENCH_STAMP := $(VENV)/.installed-bench

# Tests make 700,000 files. Where there is a disk in memory they lie there, and those of tests that pass are removed at once.
MEMORY := /dev/shm
IN_MEMORY := $(shell df --output=avail $(MEMORY) 2>/dev/null | awk 'END { exit !($$1 > 2000000) }' && \
    ! grep -q ' $(MEMORY) tmpfs [^ ]*noexec' /proc/mounts && echo yes)
PYTEST = $(if $(IN_MEMORY),PYTEST_DEBUG_TEMPROOT=$(MEMORY)) $(RUN) -m pytest $(if $(IN_MEMORY),-o tmp_path_retention_policy=failed)
# Two files at a time, in the order of tests/conftest.py.
SHARED := -n 2 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup demo test crashes papers test-spark test-cluster test-nfs test-fuse test-hdfs fresh torture torture-spark mutants man screenshots model lint bench bench-spark bench-nfs
.PHONY: clean

help: ## list these targets
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  make %-13s  %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## install dropq and all its tools into .venv (PY=python3.12 chooses a Python)

demo: $(STAMP) ## show the main job on real input, ending in an accounting of every file
	@$(RUN) examples/demo.py

# The four kinds of tests.
test: $(STAMP) ## run the tests but those of the next three (ARGS="-k lease" chooses some, ARGS="-m ''" runs those of all kinds)
	@$(PYTEST) $(SHARED) -m "not (spark or papers or crashes)" $(ARGS)

crashes: $(STAMP) ## run the tests in which processes die and calls fail, one after the other, and short storms
	@$(PYTEST) $(SHARED) -m "crashes and not (spark or papers)" $(ARGS)

papers: $(STAMP) ## run what the papers and the examples show
	@$(PYTEST) $(SHARED) -m "papers and not spark" $(ARGS)

test-spark: $(VENV)/spark.jsa ## run the tests with Spark
	@$(PYTEST) $(SHARED) -m spark $(ARGS)

test-cluster: $(VENV)/spark.jsa ## run the tests on a Spark cluster of a master and two workers, which are part of make test-spark too
	@$(RUN) -m pytest -m cluster $(ARGS)

# Spark's classes as Java keeps them in memory: with them a session starts in little more than half the time. Where they
# cannot be stored, tests do without.
$(VENV)/spark.jsa: $(STAMP)
	@echo "Storing Spark's classes, with which the tests' sessions start sooner"
	@SPARK_SUBMIT_OPTS='-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ArchiveClassesAtExit="$(abspath $@)"' \
	    $(RUN) tests/spark_classes.py >/dev/null 2>&1 || :
	@touch $@

test-nfs: $(STAMP) ## run two clients of a real NFS server, v3 and v4.2, and power cuts, in user-mode-linux
	@PYTHONPATH=tests $(RUN) -m torture --only nfs,powercut $(ARGS)

test-fuse: $(STAMP) ## run on FUSE file systems: bindfs, mergerfs, fuse-overlayfs, and one that has nothing but rename
	@PYTHONPATH=tests $(RUN) -m torture --only fuse $(ARGS)

# No registry has Hadoop's servers by name: the jars of Spark 2.4 contain them.
$(VENV)/hadoop: | $(STAMP)
	@echo "Fetching Hadoop 2.7 (210 MB)"
	@$(RUN) -m pip download --quiet --disable-pip-version-check --no-deps --no-build-isolation --dest $@.part pyspark==2.4.8
	@mkdir $@.part/jars && tar -xzf $@.part/*.tar.gz -C $@.part/jars --strip-components 3 --wildcards '*/deps/jars/*.jar'
	@mv $@.part/jars $@ && rm -r $@.part

test-hdfs: $(STAMP) $(VENV)/hadoop ## run on HDFS by FUSE: a NameNode and a DataNode of Hadoop 2.7, which are fetched first
	@PYTHONPATH=tests $(RUN) -m torture --only hdfs $(ARGS)

fresh: $(STAMP) ## run both commands of the README in a bare Debian, its oldest and newest release that will do (takes root)
	@PYTHONPATH=tests $(RUN) -m torture.fresh $(ARGS)

torture: $(STAMP) ## hold dropq against crashes, faults, power cuts, strangers and real mounts, ending in one table
	@PYTHONPATH=tests $(RUN) -m torture $(ARGS)

torture-spark: $(STAMP) ## kill Spark jobs at random moments until each phase had ten kills, and account for every message
	@PYTHONPATH=tests $(RUN) -m torture.spark_kills $(ARGS)

mutants: $(STAMP) ## change the code in small ways, and see that tests tell (ARGS="--sample 100 --seed 2" takes some of them)
	@PYTHONPATH=tests $(RUN) -m torture.mutants $(ARGS)

man: $(STAMP) ## write a manual page for each command into build/man: man -M build/man dropq-work
	@$(RUN) -m dropq.cli.man build/man

screenshots: $(STAMP) ## take the pictures of the page in docs/web, in Chromium (apt install chromium)
	@$(RUN) docs/draw_web.py

model: ## check the protocol's model with spin (apt install spin gcc)
	@model/check.sh

lint: $(STAMP) ## check style, format and types
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@# cli/ is installed as dropq.cli; mypy, which reads the sources where they lie, finds it by this link.
	@ln -sfn ../cli dropq/cli; $(RUN) -m mypy --strict dropq tests; status=$$?; rm dropq/cli; exit $$status

bench: $(BENCH_STAMP) ## measure against the raw loop of system calls and other queues (ARGS="--quick" takes minutes)
	@$(RUN) bench/bench.py $(ARGS)

bench-spark: $(STAMP) ## measure Spark jobs against plain processes and Spark's own sink
	@$(RUN) bench/bench_spark.py $(ARGS)

bench-nfs: $(STAMP) ## count the RPCs of a message over NFS, in user-mode-linux (ARGS="--only send,receive --versions v4.2")
	@$(RUN) bench/nfs.py $(ARGS)

clean: ## remove what builds, tests and tools left behind (.venv stays)
	@rm -rf build dist *.egg-info .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@rm -rf artifacts derby.log metastore_db spark-warehouse
	@find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

# The stamp is touched last, so that a set-up that broke off is done again. A .venv that works is kept.
RECENT := import sys; assert sys.version_info >= (3, 11)

$(STAMP): setup.cfg pyproject.toml
	@$(RUN) -c '$(RECENT); import pip' 2>/dev/null || { \
	    $(PY) -c '$(RECENT)' 2>/dev/null || { \
	        echo "dropq needs Python 3.11 or newer, but $(PY) says: $$($(PY) --version 2>&1 | tail -1)"; \
	        echo "Name another one:  make $(MAKECMDGOALS) PY=python3.12"; exit 1; }; \
	    $(PY) -c 'import ensurepip, venv' 2>/dev/null || { \
	        echo "$(PY) has no venv. On Debian and Ubuntu it comes with:"; \
	        echo "    sudo apt install $$($(PY) -c 'import sys; print("python%d.%d" % sys.version_info[:2])')-venv"; exit 1; }; \
	    $(PY) -m venv --clear $(VENV); }
	@echo "Installing dropq and its tools into $(VENV): this fetches 400 MB of Spark, unpacks 1100, and takes a minute or more."
	@$(PIP) wheel  # without it an old pip warns of how it builds Spark
	@$(PIP) --editable '.[dev]'
	@touch $@

# Other queues, and what draws: nothing else needs them.
$(BENCH_STAMP): $(STAMP)
	@echo "Installing the queues to compare with into $(VENV); Redis takes part where redis-server is installed."
	@$(PIP) --editable '.[bench]'
	@touch $@
