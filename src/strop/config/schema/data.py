"""Keys under `data`: the files of any kind of run, and the prompts of reinforcement learning."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from strop.config.schema.base import (
    FILES,
    MAY_CHANGE,
    SAME,
    Expected,
    Names,
    PositiveInt,
    Processes,
    Required,
    Section,
    Text,
    no_effect,
)

NO_VALIDATION = no_effect(
    "with data.val_files=[]", lambda at: at.value not in (False, -1, 0) and not at.config.data.val_files
)
PROMPT_FILE = "files of rows: .parquet, .jsonl, .json, .csv, .tsv (strop docs data)"


class RowsConfig(Section, resumes=SAME):
    """Rows for training and validation."""

    tokenizer: Annotated[str | None, FILES]
    """Tokenizer folder or name; null: the one of the model that is trained."""
    train_files: Annotated[
        Names,
        FILES,
        Required(
            PROMPT_FILE,
            "data/train.parquet",
            applies=lambda at: not at.config.trainer.val_only,
            when="unless trainer.val_only",
        ),
    ]
    """Training rows: .parquet, .jsonl, .json, .csv, .tsv, a saved data set, owner/name:split; or a list."""
    val_files: Annotated[
        Names,
        MAY_CHANGE,
        Required(
            PROMPT_FILE,
            "data/test.parquet",
            applies=lambda at: at.config.trainer.val_only,
            when="with trainer.val_only",
        ),
    ]
    """Validation rows, as train_files; [] trains without validation."""
    prompt_key: Text
    """Column with the prompt: a list of chat messages, or a plain string; a.b is field b of column a."""
    tools_key: Text | None
    """Column with a row's tools for the chat template: JSON schemas, a list or JSON text; null: none."""
    image_key: Text | None
    """Column of a prompt's pictures, a list or one; auto: images or image, if there is one; null: none."""
    min_pixels: PositiveInt | None
    """Enlarge pictures to this many pixels, in families with such a bound; null: the processor's."""
    max_pixels: PositiveInt | None
    """Shrink pictures to this many pixels, in families with such a bound; null: the processor's."""
    max_images: PositiveInt | None
    """Most pictures of a prompt; more are an error. null: the most of any row. Turns may bring others."""
    apply_chat_template: Annotated[Literal["auto"] | bool, Expected("auto, True or False")]
    """Make a plain string a user message of the chat template; auto: if the tokenizer has one."""
    system_prompt: Text | None
    """System message of chats that have none."""
    chat_template: Text | None
    """Chat template, as Jinja text or the path of its file; null: the tokenizer's own."""
    apply_chat_template_kwargs: dict[str, Any]
    """Variables of the chat template, for example {enable_thinking: False}."""
    allow_special_tokens: bool
    """Encode control tokens in the texts of rows as control tokens, as in prompts rendered beforehand."""
    train_batch_size: Annotated[PositiveInt, MAY_CHANGE]
    """Rows per iteration (strop train: of rollout.n answers each). If not set, with fewer: 32 or fewer."""
    val_batch_size: Annotated[PositiveInt, MAY_CHANGE]
    """Rows in one batch of validation; it never changes a result."""
    max_prompt_length: Annotated[PositiveInt, MAY_CHANGE]
    """Longest prompt in tokens; shorter ones are padded on the left to it."""
    max_response_length: Annotated[PositiveInt, MAY_CHANGE]
    """Longest response in tokens, its end token among them."""
    shuffle: Annotated[bool, MAY_CHANGE]
    """Visit the training rows in a new seeded order every epoch; False: in the order of the files."""
    num_workers: Annotated[Processes | None, MAY_CHANGE]
    """Processes that tokenise the files; null: one for each core."""
    cache_dir: Annotated[str, MAY_CHANGE]
    """Folder for tokenised files and for files fetched from a URL; models from the hub go into HF_HOME."""


class DataConfig(RowsConfig):
    """Prompts for training and validation."""

    reward_fn_key: Text
    """Column that names the scorer of a row (its data source)."""
    data_source: Text | None
    """Data source of the rows of files that lack the column reward_fn_key."""
    answer_key: Text | None
    """Column whose values are the ground truths; numbers become text. null: reward_model.ground_truth."""
    val_max_samples: Annotated[PositiveInt | None, MAY_CHANGE, NO_VALIDATION]
    """Validate on this many prompts of each data source, its first ones; null: on all."""
    return_raw_input_ids: Annotated[bool, MAY_CHANGE]
    """Also put the prompt's ids without the chat template into the batch."""
    return_raw_chat: Annotated[bool, MAY_CHANGE]
    """Also put the prompt's chat messages, as in the file, into the batch."""
    truncation: Annotated[Literal["error", "left", "right", "middle"], MAY_CHANGE]
    """Treatment of a prompt over max_prompt_length that is not dropped: stop, or cut it on that side."""
    filter_overlong_prompts: Annotated[bool, MAY_CHANGE]
    """Drop prompts over max_prompt_length, and log how many; False: as data.truncation says."""
