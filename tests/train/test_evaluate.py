import dataclasses
import math

import numpy as np
import pytest
import torch
from train_helpers import config, write_corpus

from megadcp.backends.torch_backend import TorchBackend
from megadcp.data.order import open_training, open_validation
from megadcp.data.step_documents import IGNORE, StepDocuments
from megadcp.engine.placement import Placement
from megadcp.engine.step import Engine
from megadcp.nn.gpt import GPT
from megadcp.parallel.gradients import GradientBuffers
from megadcp.plan.planner import planner_for
from megadcp.train.evaluate import count_targets_of_training, evaluate, unigram_entropy
from megadcp.train.finish import average, document_lengths
from megadcp.train.sample import one_document


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    return config(write_corpus(tmp_path_factory.mktemp("data")), plan={"pack_tokens": 150})


def plan_for(setup):
    planner = planner_for(setup)
    return lambda documents: planner(documents.step, documents.lengths.tolist())


def engine_of(model):
    gradients = GradientBuffers(model.named_parameters())
    return Engine(model, gradients, optimizer=None, device=torch.device("cpu"))


def test_loss_is_the_mean_over_all_targets_whatever_the_packing(setup):
    held_out = open_validation(setup.data)[0]
    model = GPT(setup.model, TorchBackend(torch.float64), 1, 64)
    assert model.training
    losses = []
    for cap in (150, 512):
        packed = dataclasses.replace(setup, plan=dataclasses.replace(setup.plan, pack_tokens=cap))
        found = evaluate(engine_of(model), held_out, plan_for(packed), 512)
        losses.append(found.loss)
    assert model.training
    model.eval()
    documents, total, count = held_out.documents(512), 0.0, 0
    for document in documents.ids:
        tokens, labels = held_out.read(int(document))
        batch = dataclasses.replace(one_document(tokens.tolist(), torch.device("cpu")), labels=torch.from_numpy(labels))
        total += float(model(batch, Placement()).detach())
        count += int((labels != IGNORE).sum())
    assert losses == pytest.approx([total / count] * 2, rel=1e-12)
    assert (found.targets, found.name) == (count, "words")


def test_evaluation_keeps_no_gradients(setup):
    model = GPT(setup.model, TorchBackend(), 1, 64)
    evaluate(engine_of(model), open_validation(setup.data)[0], plan_for(setup), 512)
    assert all(parameter.grad is None for parameter in model.parameters())


class Fixed:
    """Documents given as label lists; one a step."""

    name = "fixed"

    def __init__(self, *labels):
        self.labels = [np.array(one) for one in labels]

    def step(self, index):
        document = index % len(self.labels)
        return StepDocuments(index, np.array([document]), np.array([len(self.labels[document])]), index / len(self.labels))

    def documents(self, most):
        return StepDocuments(0, np.arange(len(self.labels)), np.array([len(one) for one in self.labels]), 0.0)

    def fill(self, ids, starts, tokens, labels):
        for document, start in zip(ids, starts, strict=True):
            labels[start : start + len(self.labels[document])] = self.labels[document]


def test_unigram_entropy_by_hand():
    counts = count_targets_of_training(Fixed([0, 0, 1, IGNORE], [2, IGNORE]), vocab=4)
    assert counts.tolist() == [2, 1, 1, 0]  # one epoch, not more
    found = unigram_entropy(counts, Fixed([0, 3, IGNORE]), 99)
    assert found == pytest.approx(-(math.log(3 / 8) + math.log(1 / 8)) / 2)
    assert math.isnan(unigram_entropy(counts, Fixed([IGNORE]), 99))


def test_counting_stops_at_its_limit():
    assert count_targets_of_training(Fixed([0] * 5, [1] * 5, [2] * 5), 3, most_tokens=6).tolist() == [5, 5, 0]


def test_counts_of_a_corpus_are_those_of_one_epoch(setup):
    source = open_training(setup.data, 20)
    counts = count_targets_of_training(source, setup.model.vocab)
    documents = source.describe()
    assert counts.sum() > 8000
    assert counts[256] > 50  # end-of-document tokens are targets
    assert counts[257:].sum() == 0
    assert "8,981 tokens" in documents[0]


def test_points_of_a_curve():
    points = [(float(x), float(2 * x)) for x in range(10)]
    assert average(points, 10) == points
    assert average(points, 4) == [(1.0, 2.0), (4.0, 8.0), (7.0, 14.0), (9.0, 18.0)]
    assert average([], 4) == []


def test_lengths_are_those_of_whole_documents(setup):
    lengths = document_lengths(setup)
    assert len(lengths) == 120
    assert lengths.max() > setup.data.max_length
