from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Prompt(_message.Message):
    __slots__ = ("id", "group", "tokens", "answer", "task")
    ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    id: int
    group: int
    tokens: bytes
    answer: str
    task: str
    def __init__(self, id: _Optional[int] = ..., group: _Optional[int] = ..., tokens: _Optional[bytes] = ..., answer: _Optional[str] = ..., task: _Optional[str] = ...) -> None: ...

class Trajectory(_message.Message):
    __slots__ = ("tokens", "mask", "logprob", "entropy", "version", "gini", "vocabulary", "experts", "experts_per_token", "reward", "prompt_id", "group", "task", "finish", "turns", "seconds")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MASK_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    ENTROPY_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    GINI_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    tokens: bytes
    mask: bytes
    logprob: bytes
    entropy: bytes
    version: bytes
    gini: bytes
    vocabulary: bytes
    experts: bytes
    experts_per_token: int
    reward: float
    prompt_id: int
    group: int
    task: str
    finish: str
    turns: int
    seconds: float
    def __init__(self, tokens: _Optional[bytes] = ..., mask: _Optional[bytes] = ..., logprob: _Optional[bytes] = ..., entropy: _Optional[bytes] = ..., version: _Optional[bytes] = ..., gini: _Optional[bytes] = ..., vocabulary: _Optional[bytes] = ..., experts: _Optional[bytes] = ..., experts_per_token: _Optional[int] = ..., reward: _Optional[float] = ..., prompt_id: _Optional[int] = ..., group: _Optional[int] = ..., task: _Optional[str] = ..., finish: _Optional[str] = ..., turns: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class Caller(_message.Message):
    __slots__ = ("sampler", "incarnation", "version", "waited_s")
    SAMPLER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    sampler: str
    incarnation: str
    version: int
    waited_s: float
    def __init__(self, sampler: _Optional[str] = ..., incarnation: _Optional[str] = ..., version: _Optional[int] = ..., waited_s: _Optional[float] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("sampler", "pid", "description")
    class DescriptionEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SAMPLER_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    sampler: str
    pid: int
    description: _containers.ScalarMap[str, str]
    def __init__(self, sampler: _Optional[str] = ..., pid: _Optional[int] = ..., description: _Optional[_Mapping[str, str]] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("incarnation", "lease_timeout_s", "other_hosts")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LEASE_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    OTHER_HOSTS_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    lease_timeout_s: float
    other_hosts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, incarnation: _Optional[str] = ..., lease_timeout_s: _Optional[float] = ..., other_hosts: _Optional[_Iterable[str]] = ...) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("caller", "max_groups", "wait_s", "holding")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    MAX_GROUPS_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    HOLDING_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    max_groups: int
    wait_s: float
    holding: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., max_groups: _Optional[int] = ..., wait_s: _Optional[float] = ..., holding: _Optional[_Iterable[int]] = ...) -> None: ...

class Group(_message.Message):
    __slots__ = ("prompts",)
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    prompts: _containers.RepeatedCompositeFieldContainer[Prompt]
    def __init__(self, prompts: _Optional[_Iterable[_Union[Prompt, _Mapping]]] = ...) -> None: ...

class LeaseReply(_message.Message):
    __slots__ = ("groups", "version", "finished")
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[Group]
    version: int
    finished: bool
    def __init__(self, groups: _Optional[_Iterable[_Union[Group, _Mapping]]] = ..., version: _Optional[int] = ..., finished: bool = ...) -> None: ...

class PutRequest(_message.Message):
    __slots__ = ("caller", "trajectories")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    trajectories: _containers.RepeatedCompositeFieldContainer[Trajectory]
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., trajectories: _Optional[_Iterable[_Union[Trajectory, _Mapping]]] = ...) -> None: ...

class PutReply(_message.Message):
    __slots__ = ("receipt",)
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    receipt: str
    def __init__(self, receipt: _Optional[str] = ...) -> None: ...

class BeatRequest(_message.Message):
    __slots__ = ("caller", "state", "seconds_in_state")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_IN_STATE_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    state: str
    seconds_in_state: float
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., state: _Optional[str] = ..., seconds_in_state: _Optional[float] = ...) -> None: ...

class BeatReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Region(_message.Message):
    __slots__ = ("name", "whole", "start", "stop")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    name: str
    whole: _containers.RepeatedScalarFieldContainer[int]
    start: _containers.RepeatedScalarFieldContainer[int]
    stop: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., whole: _Optional[_Iterable[int]] = ..., start: _Optional[_Iterable[int]] = ..., stop: _Optional[_Iterable[int]] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("sampler", "incarnation", "above", "exactly", "wait_s", "wanted")
    SAMPLER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ABOVE_FIELD_NUMBER: _ClassVar[int]
    EXACTLY_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    sampler: str
    incarnation: str
    above: int
    exactly: int
    wait_s: float
    wanted: _containers.RepeatedCompositeFieldContainer[Region]
    def __init__(self, sampler: _Optional[str] = ..., incarnation: _Optional[str] = ..., above: _Optional[int] = ..., exactly: _Optional[int] = ..., wait_s: _Optional[float] = ..., wanted: _Optional[_Iterable[_Union[Region, _Mapping]]] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("name", "dtype")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("version", "tensors", "blocks")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    version: int
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    blocks: _containers.RepeatedCompositeFieldContainer[Region]
    def __init__(self, version: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., blocks: _Optional[_Iterable[_Union[Region, _Mapping]]] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("block", "offset", "data", "crc32")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    block: int
    offset: int
    data: bytes
    crc32: int
    def __init__(self, block: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., crc32: _Optional[int] = ...) -> None: ...

class WeightsPart(_message.Message):
    __slots__ = ("manifest", "chunk")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    manifest: Manifest
    chunk: Chunk
    def __init__(self, manifest: _Optional[_Union[Manifest, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...
