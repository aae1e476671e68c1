import json
import os
import struct
import subprocess
import sys

import huggingface_hub
import ml_dtypes
import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import save_file

from svflow.models.checkpoint import open_checkpoint, write_checkpoint

DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]
CONFIG = {"model_type": "llama", "hidden_size": 4, "rope_parameters": {"rope_theta": 1e4}}


def bits(array):
    return array.view(f"u{array.dtype.itemsize}")


def make_tensors(dtype, seed=0):
    """Random bit patterns, NaNs with a payload and infinities among them, in several shapes."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    shapes = {"a.weight": (3, 4), "b.bias": (7,), "scalar": (), "none": (0, 3), "c": (2, 1, 5)}
    return {
        name: np.frombuffer(
            rng.bytes(dtype.itemsize * int(np.prod(shape, dtype=int))), dtype
        ).reshape(shape)
        for name, shape in shapes.items()
    }


def assert_same(checkpoint, tensors):
    assert checkpoint.shapes == {name: tensor.shape for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        read = checkpoint.read(name)
        assert read.dtype == tensor.dtype, name
        assert read.shape == tensor.shape, name
        np.testing.assert_array_equal(bits(read), bits(tensor), err_msg=name)


def write_shards(folder, shards, weight_map=None):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for file, tensors in shards.items():
        save_file(tensors, folder / file)
    if weight_map is None:
        weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


@pytest.fixture
def shards():
    tensors = make_tensors(np.float32)
    names = list(tensors)
    return {
        "model-00001-of-00002.safetensors": {name: tensors[name] for name in names[:2]},
        "model-00002-of-00002.safetensors": {name: tensors[name] for name in names[2:]},
    }


@pytest.mark.parametrize("dtype", DTYPES)
def test_written_checkpoints_are_read_back_bit_for_bit(tmp_path, dtype):
    tensors = make_tensors(dtype)
    write_checkpoint(tmp_path / "new" / "folder", CONFIG, tensors.items())
    checkpoint = open_checkpoint(tmp_path / "new" / "folder")
    assert checkpoint.config == CONFIG
    assert checkpoint.source == str(tmp_path / "new" / "folder")
    assert_same(checkpoint, tensors)


def test_a_read_tensor_belongs_to_the_caller(tmp_path):
    write_checkpoint(tmp_path, CONFIG, [("a", np.ones(3, np.float32))])
    checkpoint = open_checkpoint(tmp_path)
    checkpoint.read("a")[:] = 5
    np.testing.assert_array_equal(checkpoint.read("a"), 1)


def test_writing_takes_strided_arrays_and_big_endian_ones(tmp_path):
    square = np.arange(12, dtype=np.float32).reshape(3, 4)
    write_checkpoint(tmp_path, CONFIG, [("t", square.T), ("big", square.astype(">f4"))])
    checkpoint = open_checkpoint(tmp_path)
    np.testing.assert_array_equal(checkpoint.read("t"), square.T)
    np.testing.assert_array_equal(checkpoint.read("big"), square)


def test_the_written_file_says_pt_and_is_as_readable_as_the_config(tmp_path):
    write_checkpoint(tmp_path, CONFIG, make_tensors(np.float32).items())
    raw = (tmp_path / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
    assert header["__metadata__"] == {"format": "pt"}
    modes = {(tmp_path / name).stat().st_mode for name in ("config.json", "model.safetensors")}
    assert len(modes) == 1
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        (CONFIG, [("x", np.zeros(2, np.int8))], "x is int8"),
        (CONFIG, [("x", np.zeros(2)), ("x", np.zeros(2))], "two tensors are named x"),
        ({"a": object()}, [("x", np.zeros(2))], "JSON"),
    ],
)
def test_what_cannot_be_written_leaves_the_old_files(tmp_path, config, tensors, message):
    old = make_tensors(np.float32)
    write_checkpoint(tmp_path, CONFIG, old.items())
    with pytest.raises(ValueError, match=message):
        write_checkpoint(tmp_path, config, tensors)
    assert_same(open_checkpoint(tmp_path), old)


def test_a_failure_while_writing_leaves_the_old_files(tmp_path, monkeypatch):
    old = make_tensors(np.float32)
    write_checkpoint(tmp_path, CONFIG, old.items())

    def full_disk(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr("svflow.models.checkpoint.save_file", full_disk)
    with pytest.raises(OSError, match="no space"):
        write_checkpoint(tmp_path, {"other": 1}, make_tensors(np.float32, seed=1).items())
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config == CONFIG
    assert_same(checkpoint, old)


def test_shards_are_read_through_their_index(tmp_path, shards):
    write_shards(tmp_path, shards)
    assert_same(
        open_checkpoint(tmp_path), {n: t for part in shards.values() for n, t in part.items()}
    )


def test_a_string_path_and_a_home_path_work(tmp_path, monkeypatch):
    tensors = make_tensors(np.float32)
    write_checkpoint(tmp_path / "model", CONFIG, tensors.items())
    assert_same(open_checkpoint(str(tmp_path / "model")), tensors)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert_same(open_checkpoint("~/model"), tensors)


@pytest.mark.parametrize("source", ["./nowhere", "/no/where", "~/nowhere", "a/b/c", "model.gguf"])
def test_a_missing_path_is_named(source, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match=source):
        open_checkpoint(source)


def test_a_missing_path_object_is_never_a_repository(tmp_path, monkeypatch):
    def no_download(*args, **kwargs):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_download)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="gpt2"):
        open_checkpoint(tmp_path.relative_to(tmp_path) / "gpt2")


def test_an_empty_folder_and_a_folder_without_weights(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"no weights .*model\.safetensors"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{'a': 1}", "config.json is not valid"),
        ("[1]", "not a JSON object"),
        ('{"a": 1, "a": 2}', "a is listed twice"),
        ("\udcff", "config.json is not valid"),
    ],
)
def test_a_bad_config_is_named(tmp_path, text, message):
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=message):
        open_checkpoint(tmp_path)


def test_a_file_that_is_not_a_checkpoint_is_refused(tmp_path):
    write_checkpoint(tmp_path, CONFIG, make_tensors(np.float32).items())
    with pytest.raises(ValueError, match=r"model\.safetensors: a checkpoint is a folder"):
        open_checkpoint(tmp_path / "model.safetensors")


def test_a_missing_shard_is_named(tmp_path, shards):
    write_shards(tmp_path, shards)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00002"):
        open_checkpoint(tmp_path)


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d": FIRST}, r"d is not in .*00001"),
        ({"a.weight": SECOND}, r"a\.weight is not in .*00002"),
        ({"a.weight": None}, r"00001.* holds a\.weight, which the index does not list"),
        ({"c": f"../{SECOND}"}, "not a file name"),
        ({"c": 5}, "not a file name"),
        (dict.fromkeys(["a.weight", "b.bias", "scalar", "none", "c"]), "no weight_map"),
    ],
)
def test_an_index_has_to_agree_with_its_shards(tmp_path, shards, changes, message):
    where = {name: file for file, tensors in shards.items() for name in tensors} | changes
    write_shards(tmp_path, shards, {name: file for name, file in where.items() if file})
    with pytest.raises(ValueError, match=message):
        open_checkpoint(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path, shards):
    shards[FIRST]["c"] = shards[SECOND]["c"]
    write_shards(tmp_path, shards)
    with pytest.raises(ValueError, match=r"c is both in .*00001.* and in .*00002"):
        open_checkpoint(tmp_path)


def test_an_index_that_lists_a_tensor_twice_is_refused(tmp_path, shards):
    index = write_shards(tmp_path, shards)
    text = index.read_text()
    entry = '"c": "model-00002-of-00002.safetensors"'
    assert entry in text
    index.write_text(text.replace(entry, f'"c": "model-00001-of-00002.safetensors", {entry}'))
    with pytest.raises(ValueError, match="c is listed twice"):
        open_checkpoint(tmp_path)


def test_every_truncation_is_noticed_and_named(tmp_path):
    write_checkpoint(tmp_path, CONFIG, make_tensors(np.float16).items())
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
            open_checkpoint(tmp_path)


def test_a_truncated_shard_is_named(tmp_path, shards):
    write_shards(tmp_path, shards)
    file = tmp_path / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"model-00002-of-00002\.safetensors is damaged"):
        open_checkpoint(tmp_path)


def test_a_file_that_shrinks_after_opening_is_noticed(tmp_path):
    write_checkpoint(tmp_path, CONFIG, [("a", np.ones(1000, np.float32))])
    checkpoint = open_checkpoint(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 200)
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        checkpoint.read("a")


def write_raw(path, header, data):
    text = header.encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_duplicate_names_in_a_safetensors_header_are_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    one = '"x": {"dtype": "F32", "shape": [1], "data_offsets": [%d, %d]}'
    header = "{" + one % (0, 4) + ", " + one % (4, 8) + "}"
    write_raw(tmp_path / "model.safetensors", header, bytes(8))
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("code", ["F8_E4M3", "F8_E5M2", "I8", "I16", "U16", "C64"])
def test_other_dtypes_are_refused_with_the_tensors_name(tmp_path, code):
    (tmp_path / "config.json").write_text("{}")
    size = {"F": 1, "I8": 1, "I1": 2, "U1": 2, "C6": 8}.get(code[:2], 1)
    header = {"layer.weight": {"dtype": code, "shape": [1], "data_offsets": [0, size]}}
    write_raw(tmp_path / "model.safetensors", json.dumps(header), bytes(size))
    with pytest.raises(ValueError, match=rf"layer\.weight in .* stored as {code}"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8, np.bool_])
def test_buffers_are_listed_and_not_read(tmp_path, dtype):
    (tmp_path / "config.json").write_text("{}")
    tensors = {"w": np.ones(2, np.float32), "position_ids": np.zeros((1, 4), dtype)}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.shapes == {"w": (2,), "position_ids": (1, 4)}
    np.testing.assert_array_equal(checkpoint.read("w"), 1)
    with pytest.raises(ValueError, match=r"position_ids .* not floating point"):
        checkpoint.read("position_ids")


def make_hub_cache(root, repository, monkeypatch):
    """A cache as huggingface_hub lays it out, with no network. Returns the snapshot's folder."""
    revision = "0" * 40
    folder = root / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(revision)
    snapshot = folder / "snapshots" / revision
    snapshot.mkdir(parents=True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(root))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return snapshot


@pytest.mark.parametrize("repository", ["org/some-model", "gpt2"])
def test_a_hub_id_is_read_from_the_cache_offline(tmp_path, monkeypatch, repository):
    snapshot = make_hub_cache(tmp_path, repository, monkeypatch)
    tensors = make_tensors(np.float32)
    write_checkpoint(snapshot, CONFIG, tensors.items())
    assert_same(open_checkpoint(repository), tensors)


def test_a_hub_id_that_cannot_be_had_is_named(tmp_path, monkeypatch):
    make_hub_cache(tmp_path, "org/some-model", monkeypatch)
    with pytest.raises(FileNotFoundError, match="'org/other' is neither an existing path nor"):
        open_checkpoint("org/other")


def test_pickled_weights_are_asked_of_the_hub_only_without_safetensors(tmp_path, monkeypatch):
    tensors = make_tensors(np.float32)
    asked = []

    def download(repository, allow_patterns):
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    write_checkpoint(tmp_path, CONFIG, tensors.items())
    assert_same(open_checkpoint("org/model"), tensors)
    assert len(asked) == 1
    assert not any(pattern.endswith(".bin") for pattern in asked[0])
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="no weights"):
        open_checkpoint("org/model")
    assert any(pattern.endswith(".bin") for pattern in asked[2])


def test_pickled_weights_without_torch_say_how_to_convert(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ValueError, match="save_pretrained"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pickled_weights_are_read_bit_for_bit(tmp_path, dtype, zipped):
    torch = pytest.importorskip("torch")
    tensors = make_tensors(dtype)

    def to_torch(array):
        kind = getattr(torch, array.dtype.name)
        return torch.frombuffer(bytearray(array.tobytes()), dtype=kind).reshape(array.shape)

    state = {name: to_torch(array) for name, array in tensors.items() if array.size}
    state["none"] = torch.zeros(0, 3, dtype=getattr(torch, np.dtype(dtype).name))
    state["c"] = torch.nn.Parameter(state["c"])
    state["a.weight"] = state["a.weight"].T.contiguous().T
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.save(state, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    assert_same(open_checkpoint(tmp_path), tensors)


def test_pickled_shards_and_what_is_wrong_with_them(tmp_path):
    torch = pytest.importorskip("torch")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    first, second = tmp_path / "pytorch_model-1.bin", tmp_path / "pytorch_model-2.bin"
    torch.save({"a": torch.ones(3)}, first)
    torch.save({"b": torch.zeros(2, dtype=torch.int64)}, second)
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"a": first.name, "b": second.name}}))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.shapes == {"a": (3,), "b": (2,)}
    np.testing.assert_array_equal(checkpoint.read("a"), 1)
    with pytest.raises(ValueError, match=r"b in .*pytorch_model-2\.bin is torch\.int64"):
        checkpoint.read("b")
    torch.save({"b": {"nested": torch.ones(1)}}, second)
    with pytest.raises(ValueError, match=r"b in .*pytorch_model-2\.bin is a dict"):
        open_checkpoint(tmp_path)
    torch.save([torch.ones(1)], second)
    with pytest.raises(ValueError, match=r"pytorch_model-2\.bin holds a list"):
        open_checkpoint(tmp_path)
    second.write_bytes(first.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"pytorch_model-2\.bin is damaged"):
        open_checkpoint(tmp_path)
    second.unlink()
    with pytest.raises(FileNotFoundError, match=r"pytorch_model-2\.bin"):
        open_checkpoint(tmp_path)


def test_a_pickle_cannot_run_code(tmp_path):
    torch = pytest.importorskip("torch")

    class Harmful:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "harmed"),))

    (tmp_path / "config.json").write_text("{}")
    torch.save({"a": Harmful()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is damaged"):
        open_checkpoint(tmp_path)
    assert not (tmp_path / "harmed").exists()


# Not getrusage's ru_maxrss: it starts at that of the process that started this one.
MEASURE = """
import re, sys
from svflow.models.checkpoint import open_checkpoint
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024
checkpoint = open_checkpoint(sys.argv[1])
before = peak()
for name in checkpoint.shapes:
    checkpoint.read(name)
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="measured through /proc")
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "gguf", "bin"])
def test_reading_all_tensors_holds_about_one_at_a_time(tmp_path, kind):
    """48 tensors of 8 MiB each: their whole would be seen by far."""
    if kind == "gguf":
        from test_gguf import write_gguf  # the same file as in the tests of GGUF

        source = tmp_path / "model.gguf"
        write_gguf(source, "llama", width=1024, hidden=2048, layers=16, heads=8, kind="F16")
    elif kind == "bin":
        torch = pytest.importorskip("torch")
        source = tmp_path
        (source / "config.json").write_text("{}")
        weights = {f"{i}": torch.ones(2048, 1024) for i in range(48)}
        torch.save(weights, source / "pytorch_model.bin")
    else:
        source = tmp_path
        dtype = np.dtype(kind)
        ones = np.ones((2048, 4096 // dtype.itemsize), dtype)
        write_checkpoint(source, CONFIG, [(f"{i}", ones) for i in range(48)])
    command = [sys.executable, "-c", MEASURE, str(source)]
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert grown < 40, f"{grown} MiB"
