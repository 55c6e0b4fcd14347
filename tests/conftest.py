"""Set-up of all tests: kernels run on the GPU, or without one in the simulator; tests marked gpu are skipped
without a GPU; outputs start as NaN; the run compiles into a cache of its own."""

import fcntl
import gc
import glob
import json
import os
import re
import sys
import time

# torch reads this when it is imported. With a thread per core in each worker, the workers would mostly wait
# for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# cuBLAS reads this when CUDA starts. Without it, matrix products fail in deterministic mode, which fills new
# memory with NaN.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# Several workers share several GPUs: each begins with another one. torch reads this when CUDA starts.
if "PYTEST_XDIST_WORKER" in os.environ and (gpus := len(glob.glob("/dev/nvidia[0-9]*"))) > 1:
    first = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")) % gpus
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", ",".join(str((first + i) % gpus) for i in range(gpus)))

# JAX reads this when it is imported. Otherwise it takes three quarters of the GPU's memory, and none is left
# for other workers.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# rich reads this when cukern.cli is imported. Without it, and without a terminal, tables are 80 columns wide.
os.environ.pop("COLUMNS", None)

import pytest
import torch
from helpers import DEVICE, PLACE, forget_cache

import cukern
from cukern.bench.environment import facts
from cukern.runtime.registry import CASES

START = time.time()
NO_GPU = "needs a GPU, and torch.cuda sees none"


def pytest_report_header(config):
    if not torch.cuda.is_available():
        return (
            f"cukern: torch {torch.__version__} sees no GPU: kernels run in the simulator, and the tests "
            f"marked gpu are skipped"
        )
    return f"cukern: torch {torch.__version__} on {torch.cuda.get_device_name()}"


# Tests that take more than two seconds on two cores, as patterns of their names. `pytest` leaves them out,
# `pytest -m ""` runs them too.
SLOW = re.compile(
    "|".join(
        (
            # of the machine code, and of the tools
            r"test_compiled|test_sanitizer|test_torture|test_(two|four)_processes|test_trainer|"
            r"warmup\[.*(a100|rtx4090|h200)",
            r"test_pytest_benchmarks|test_launches_|test_a_ledger_lists|test_measure_host_in|"
            r"test_missing_packages|test_blocks_of_the_readme",
            r"test_an_example_runs|test_every_block_runs.*(judge|transformers|roofline|layernorm1|softmax1)|"
            r"test_sim_tracebacks|test_one_wheel|test_the_site_builds",
            r"test_a_closed_pipe|test_a_full_disk|test_a_wrong_|test_doctor_of|test_stderr_has|"
            r"test_compile_(prints|lists)",
            r"test_bench_(records|in_tf32|prints)|test_forward_and_backward_together|test_the_record_names|"
            r"test_a_second_process|test_forks_while",
            r"test_cupy_is|test_a_cache_that_root|test_converted_logits|test_a_process_that_is_killed|"
            r"test_output_on_a_terminal.*(compile|check)",
            r"test_cooperative_groups_of|test_jax_arrays|test_a_forward_only_op|test_a_correct_op|"
            r"test_record_appends|test_non_integers",
            r"test_sim_speed|test_every_instruction_of_the_shipped|test_blocks_that_spin|test_own_kernel|"
            r"test_startup_rows|test_sim_fla.*(chunk|delta|rwkv6)",
            r"test_installed|test_new_version|test_cli_new_in_tree|test_two_commands|test_a_benchmark_runs|"
            r"test_cli_watch|test_tables_fit",
            r"test_headers_of_nvidia.*(cub|groups|atomic)|test_llama_block|test_report_in_a_browser|"
            r"test_as_a_module",
            r"test_an_environment_variable|test_import_touches_no_device|test_public_names_are_imported",
            r"test_kernels_loads_it|test_the_pytest_plugin|test_compiles_and_simulates_without",
            # of all ops
            r"test_a_replay_gives_the_bits.*(attention|kron|linear|matmul|rope|cross_entropy|softmax|"
            r"embedding|geglu|gelu_)",
            r"test_every_version_forward_and_backward|test_fuzz|test_transforms|test_autocast|"
            r"test_derivatives_of_every_order|gradgradcheck",
            r"compiled_with_all|first_called_inside_of",
            r"test_torch_compile_(?!without_a_graph_break\[square-cpu)|test_(equal_inputs|"
            r"an_expanded).*\[(attention|matmul|linear|kron|softmax-sim-v[12])",
            r"against_float64\[.*((matmul|linear|attention|norm).*-sim|softmax-sim-v[1-6])|"
            r"process_defaults.*attention|test_a_compiled_function",
            r"test_registry.*\[(causal|linear_cross)|test_nonsense.*attention-(version-77|sink-45|k-6)-k|"
            r"test_compiled_functions|simulated.attention",
            r"test_dynamic.*(model_|rope.*torch|(marked|every).*(attention|kron|rope_|linear|matmul|softmax|"
            r"grouped|full|window|lengths|decode|packed|adamw))",
            # of one op
            r"attention/test_(accuracy|float32|sdpa.*(True|-128-|-40-|dropout))|shorter_sequences|"
            r"test_varlen.*(float32|128|256|float16|do_not_touch|derivatives)",
            r"attention/test_fused.*(128|256|136|96|opcheck|test_window|test_packed|110, "
            r"40|every_option.*-v3|infinite_sinks|persistent)",
            r"attention/test_bias.*(128|256|96|float32|layouts.*v3|kernels_compile|replays|a_compiled|"
            r"derivatives|torch.*v3)",
            r"attention/test_dropout.*(128|256|96|200|kernels_compile|0\.9|the_mean|a_compiled|a_seed)",
            r"attention/test_decode.*(float32|(number_of_keys|fit).*256)|attention/test_paged.*(128|softcap)",
            r"another_compiler.*numba",
            r"test_every_small_size|no_16_bit_tensor.*sim-(attention|kron)|no_common_factor.*sim.*(matmul|"
            r"kron)",
            r"test_higher_derivatives|test_a_variable_chooses|test_linear_cross_entropy.*every_option",
            r"test_tensor_cores|test_matmul_v5|test_every_pair_of_layouts|"
            r"test_gradients_of_every_input_alone|test_shapes_that_split",
            r"test_kron_linear_\w+\.|test_kron_linear.*(only_wanted|torchs_own|third|lokr|scale_bias|"
            r"every_layout)",
            r"test_halves_are_read|test_the_kernel_that_reads|test_te_formats|test_16_bit_parameters|"
            r"test_lengths_with_leading|test_scales",
            r"test_small_results|test_neighbouring_heads|test_every_length",
            r"softmax.*(rows_of_|rows_that|any_alignment|long_rows|every_row_storage|every_size)|"
            r"test_gradients_in_torch|embedding.*gradcheck",
            r"test_two_ranks_against_float64",
            r"integrations.*(compiled_whole|in_the_simulator)|test_losses_with_weights_as_torch.*sim",
            # of the trainer
            r"test_killed_at_any|test_newcomer|test_study$|test_ten_steps|test_recomputation|"
            r"test_half_precision",
            r"test_a_cache_changes_no_logits.*None|test_each_kernel_of_the_fork",
            r"gpt2/test_parallel|test_every_op_in_two_processes|test_logits_loss_and_gradients.*kernels|"
            r"test_two_runs|test_the_fused_loss",
        )
    )
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if SLOW.search(item.nodeid):
            item.add_marker(pytest.mark.slow)
        if not torch.cuda.is_available() and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=NO_GPU))


def pytest_collection_finish():
    """Freeze the imported objects, so that the garbage collector does not search them again during each
    simulated kernel."""
    if PLACE == "sim":
        gc.collect()
        gc.freeze()
        gc.set_threshold(100_000, 20, 20)


def pytest_terminal_summary(terminalreporter):
    skipped = sum(NO_GPU in str(report.longrepr) for report in terminalreporter.stats.get("skipped", []))
    if skipped:
        terminalreporter.write_line(
            f"{skipped} tests were skipped for want of a GPU; the kernels ran in the simulator", yellow=True
        )


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """With CUKERN_RECORD_TESTS=FILE the run's counts go to FILE, as a line of JSON with the commit and the
    GPU."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    file = os.environ.get("CUKERN_RECORD_TESTS")
    if file and reporter and "PYTEST_XDIST_WORKER" not in os.environ:
        counts = {
            what: len(reporter.stats.get(what, [])) for what in ("passed", "failed", "error", "skipped")
        }
        seconds = round(time.time() - START)
        with open(file, "a") as out:
            out.write(
                json.dumps(
                    {
                        **counts,
                        "seconds": seconds,
                        "arguments": session.config.invocation_params.args,
                        **facts(),
                    }
                )
                + "\n"
            )


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory):
    """One folder of cubins for the whole run, empty at its start, so that nothing compiled earlier can hide a
    fault; the workers of pytest-xdist, whose own folders lie in the run's, share it, as processes may."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "cubins"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUKERN_CACHE_DIR", str(folder))
        forget_cache()
        yield folder
    forget_cache()


@pytest.fixture
def registry():
    """Ops that a test defines leave the registry at its end."""
    before, path = dict(CASES), list(sys.path)
    yield
    CASES.clear()
    CASES.update(before)
    sys.path[:] = path


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """An empty cache folder for one test."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("CUKERN_CACHE_DIR", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    forget_cache()
    yield folder
    monkeypatch.undo()
    forget_cache()


@pytest.fixture
def device():
    """The device of the tensors on which kernels run: the GPU's, or in the simulator the CPU."""
    return DEVICE


@pytest.fixture(autouse=True)
def simulator(request):
    """Tests marked kernels: where there is no GPU they run in the simulator."""
    with cukern.backend("sim" if PLACE == "sim" and request.node.get_closest_marker("kernels") else "gpu"):
        yield


@pytest.fixture(autouse=True)
def poison(request):
    """Tests of kernels: torch.empty gives NaN (integers: the largest), so that an element which a kernel does
    not write is seen."""
    if not (request.node.get_closest_marker("gpu") or request.node.get_closest_marker("kernels")):
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.fixture(autouse=True)
def gpu_memory():
    """Several workers share one GPU: none keeps gigabytes that its tests no longer use."""
    yield
    if DEVICE == "cuda" and torch.cuda.memory_reserved() > 1 << 30:
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture
def most_memory(tmp_path_factory):
    """Tests of 10 to 20 GB run one after the other, whatever the number of workers."""
    folder = tmp_path_factory.getbasetemp()
    with open(
        (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "most_memory", "w"
    ) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        if torch.cuda.is_available():
            gc.collect()
            torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
