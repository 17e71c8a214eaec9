"""Texts in every language: what a tokenizer makes of them, what a run keeps of it, and its one line of warning."""

import csv
import itertools
import json
import os
import random
import subprocess
import sys
import unicodedata

import numpy as np
import pytest
from safetensors import safe_open
from sklearn.linear_model import LogisticRegression
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from fedjax_ssl import UserError, load, train
from fedjax_ssl.data import load_dataset
from fedjax_ssl.data.kinds.tokenizer import make_tokenizer, num_tokens, tokenise
from fedjax_ssl.serve.export import export_run, hub
from fedjax_ssl.serve.predictor import predict_file
from tests.helpers.partitions import data_config
from tests.helpers.stub import make_stub_config

# Language -> words of the weather, words of the kitchen, sentences about two of them.
LANGUAGES = {
    "English": (
        "rain snow wind storm clouds thunder fog frost", "rice soup bread fish salt onions tea oil",
        "today we talked about {} and {} again|yesterday the neighbours spoke of {} and of {}|"
        "tomorrow they want to know more about {} or {}|in the morning a teacher told us of {} with {}",
    ),
    "Chinese": (
        "下雨 大雪 台风 雷电 乌云 浓雾 冰霜 寒潮", "米饭 鸡汤 面包 鲜鱼 食盐 洋葱 绿茶 豆油",
        "今天我们又谈到{}和{}|昨天邻居说起{}还有{}|他们明天想知道{}以及{}的事|早上有一位老师提过{}与{}",
    ),
    "Hindi": (
        "बारिश हिमपात आँधी तूफ़ान बादल बिजली कोहरा ठंड", "चावल दाल रोटी मछली नमक प्याज़ चाय तेल",
        "आज हमने फिर {} और {} की बात की|कल पड़ोसियों ने {} तथा {} का ज़िक्र किया|"
        "वे कल {} या {} के बारे में जानना चाहते हैं|सुबह एक शिक्षक ने हमें {} के साथ {} बताया",
    ),
    "Thai": (
        "ฝนตก หิมะ ลมแรง พายุ เมฆ ฟ้าร้อง หมอก น้ำค้าง", "ข้าว แกง ขนมปัง ปลา เกลือ หัวหอม น้ำชา น้ำมัน",
        "วันนี้เราคุยเรื่อง{}และ{}อีก|เมื่อวานเพื่อนบ้านพูดถึง{}กับ{}|พรุ่งนี้พวกเขาอยากรู้เรื่อง{}หรือ{}|ตอนเช้าครูเล่าเรื่อง{}พร้อม{}",
    ),
    "Arabic": (
        "مطر ثلج ريح عاصفة سحاب رعد ضباب صقيع", "أرز حساء خبز سمك ملح بصل شاي زيت",
        "تحدثنا اليوم عن {} و{} مرة أخرى|ذكر الجيران أمس {} ثم {}|غدا يريدون معرفة المزيد عن {} أو {}|"
        "في الصباح أخبرنا معلم عن {} مع {}",
    ),
}  # fmt: skip


def sentences(language):
    """(text, topic) for training and for testing: a test sentence has two words that no training sentence has both."""
    *topics, frames = LANGUAGES[language]
    parts = [], []
    for topic, words in zip(("weather", "kitchen"), topics):
        for (a, first), (b, second) in itertools.permutations(enumerate(words.split()), 2):
            parts[(a + b) % 4 == 0].extend((frame.format(first, second), topic) for frame in frames.split("|"))
    return parts


def write(path, rows):
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("note", "topic"), *rows])
    return str(path)


def fields_of(tmp_path, train_rows, test_rows=()):
    given = {"path": write(tmp_path / "train.csv", train_rows), "label_column": "topic", "text_column": "note"}
    if test_rows:
        given["test_path"] = write(tmp_path / "test.csv", test_rows)
    return {"source": "csv", "text_length": 24, **given}


def read(fields):
    return load_dataset(data_config(**fields))


def accuracy(dataset, rows):
    """Of a linear model of the tokens that a text has, trained on some rows."""
    number = dataset.details["num_tokens"]

    def bags(tokens):
        return np.stack([np.bincount(row, minlength=number)[1:] > 0 for row in tokens])

    model = LogisticRegression().fit(bags(dataset.x_train[rows]), dataset.y_train[rows])
    return model.score(bags(dataset.x_test), dataset.y_test)


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_language_is_learnt_from_few_texts(tmp_path, capsys, language):
    """With words between spaces as tokens, Chinese and Thai have one token a text, and chance is 50 %."""
    parts = sentences(language)
    dataset = read(fields_of(tmp_path, *parts))
    assert len(dataset.x_train) == 352 and len(dataset.x_test) == 96
    tokens = dataset.x_test[dataset.x_test > 0]
    assert np.mean(tokens == 1) == 0 and len(tokens) > 3 * len(dataset.x_test) and not capsys.readouterr().err
    assert accuracy(dataset, np.arange(352)) >= 0.99
    assert accuracy(dataset, random.Random(0).sample(range(352), 60)) >= 0.95


def test_a_letter_is_one_letter_however_it_is_composed():
    """Precomposed, decomposed, wide, in upper case."""
    words = ["café", "naïve", "पढ़ाई", "ﬁsh", "ABC"]
    others = [unicodedata.normalize("NFD", "Café"), unicodedata.normalize("NFD", "NAÏVE"),
              unicodedata.normalize("NFD", "पढ़ाई"), "fish", "\uff41\uff42\uff43"]  # fmt: skip
    made = make_tokenizer(words * 20, "", 200)
    found = [tokenise(texts, made, 6, "here") for texts in (words, others)]
    np.testing.assert_array_equal(*found)
    assert (found[0][:, 0] > 1).all()


def test_neither_threads_nor_the_order_of_texts_change_a_tokenizer():
    texts = [text for language in LANGUAGES for text, _ in sentences(language)[0]]
    made = make_tokenizer(texts, "", 500)
    again = (
        "import json, sys; from fedjax_ssl.data.kinds.tokenizer import make_tokenizer; "
        "sys.stdout.buffer.write(make_tokenizer(json.load(sys.stdin)[::-1], '', 500).encode())"
    )
    environment = {**os.environ, "RAYON_NUM_THREADS": "7", "TOKENIZERS_PARALLELISM": "true"}
    given = json.dumps(texts).encode()
    other = subprocess.run([sys.executable, "-c", again], input=given, env=environment, capture_output=True, check=True)
    assert other.stdout.decode() == made and num_tokens(made) == 501


def test_a_tokenizer_of_a_file(tmp_path):
    """Its padding, truncation and special tokens are left out; an id is the file's plus one."""
    own = Tokenizer(models.WordPiece({"[PAD]": 0, "[CLS]": 1, "[UNK]": 2, "rain": 3, "##bow": 9}, unk_token="[UNK]"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    own.post_processor = processors.TemplateProcessing("[CLS] $A", None, [("[CLS]", 1)])
    own.enable_padding(length=50)
    own.enable_truncation(2)
    own.save(str(tmp_path / "tokenizer.json"))
    texts = ["rain rainbow hail", "rainbow", "rain rain rain rain"] * 10
    rows = [(text, "ab"[number % 2]) for number, text in enumerate(texts)]
    file = str(tmp_path / "tokenizer.json")
    dataset = read({**fields_of(tmp_path, rows, rows[:3]), "text_length": 4, "tokenizer": file})
    assert dataset.x_test.tolist() == [[4, 4, 10, 3], [4, 10, 0, 0], [4, 4, 4, 4]]
    assert dataset.details["num_tokens"] == 11


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"tokenizer": "none.json"}, r"data\.tokenizer=none\.json does not exist; give a tokenizer\.json"),
        ({"tokenizer": "train.csv"}, r"data\.tokenizer=train\.csv is not a tokenizer\.json"),
        ({"tokenizer": "pipe"}, r"data\.tokenizer=pipe is a pipe"),
        ({"tokenizer": "train.csv", "text_column": ""}, r"data\.tokenizer=train\.csv is for texts"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_one_line(tmp_path, monkeypatch, fields, line):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with pytest.raises(UserError, match=line) as caught:
        read({**fields_of(tmp_path, sentences("English")[0]), **fields})
    assert "\n" not in str(caught.value)


def test_texts_of_another_language_are_told(tmp_path, capsys):
    train_rows, test_rows = sentences("English")[0], sentences("Chinese")[1]
    dataset = read(fields_of(tmp_path, train_rows, test_rows))
    line = capsys.readouterr().err
    assert f"warning: {tmp_path / 'test.csv'}: 100% of the tokens of the texts, such as '" in line
    assert line.count("\n") == 1 and (dataset.x_test[:, :5] == 1).all()
    read(fields_of(tmp_path, [*train_rows, *sentences("Thai")[0]], [*sentences("Thai")[1], *test_rows[:9]]))
    assert not capsys.readouterr().err  # a few texts are another matter


@pytest.mark.test_all
def test_a_run_keeps_its_tokenizer(tmp_path, capsys):
    """`predict` and exports need neither the file nor the training texts; another tokenizer does not resume the run."""
    english = sentences("English")
    (tmp_path / "own.json").write_text(make_tokenizer([text for text, _ in english[0]], "", 100))
    fields = {**fields_of(tmp_path, *english), "tokenizer": str(tmp_path / "own.json")}
    dataset = read(fields)
    settings = {f"data.{name}": value for name, value in fields.items()}
    config = make_stub_config(**settings, **{"num_rounds": 1, "log.tensorboard": False, "data.server_labels": 10})
    train(config, tmp_path / "run")
    (tmp_path / "own.json").write_text(make_tokenizer([text for text, _ in english[0]], "", 99))
    with pytest.raises(UserError, match=r"the data set is not what the checkpoint .* was trained with"):
        train(make_stub_config(**settings, **{"num_rounds": 2, "data.server_labels": 10}), tmp_path / "run")
    for name in ("own.json", "train.csv"):
        (tmp_path / name).unlink()
    capsys.readouterr()
    found = predict_file(tmp_path / "run", tmp_path / "out.csv", csv=fields["test_path"], allow_code=True)
    expected = load(tmp_path / "run", allow_code=True)(dataset.x_test)
    np.testing.assert_array_equal(found.prediction.probabilities, expected.probabilities)
    assert found.labelled == 96 and not capsys.readouterr().err
    export_run(tmp_path / "run", tmp_path / "model.safetensors", "safetensors", allow_code=True)
    with safe_open(tmp_path / "model.safetensors", "numpy") as file:
        assert file.metadata()["tokenizer"] == dataset.details["tokenizer"]
    facts = json.loads((tmp_path / "run" / "dataset.json").read_text())
    contents = hub.contents(tmp_path / "run", {**facts, "round": 1}, {"safetensors": b"", "stablehlo": b""}, "mit")
    kept = Tokenizer.from_str(contents["tokenizer.json"].decode())
    ids = np.array(kept.encode(english[1][0][0]).ids) + 1
    np.testing.assert_array_equal(dataset.x_test[0][: len(ids)], ids)
    assert "tokenizer" not in json.loads(contents["config.json"]) and b"plus 1, then 0" in contents["README.md"]
