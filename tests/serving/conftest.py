import pytest
from serving.served import save_models


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("models"))
