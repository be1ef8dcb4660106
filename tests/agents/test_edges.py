"""What becomes the row of a session: limits, retries and texts at its edges."""

from __future__ import annotations

from scripted_agents import HI, agents, new_session
from test_limits import _asks, _ended, _Open

from strop.agents.chat import asked


def test_requests_at_the_same_time_share_the_room_that_is_left():
    session = new_session(room=2)
    nodes = session.begin([session.ask(asked({"messages": HI})) for _ in range(3)])
    limits = session.limits(nodes)
    assert limits == [1, 1, 0]
    for node, limit in zip(nodes, limits, strict=True):
        node.ids = [129] * limit
        session.answer(node)
    assert len(session.row().ids) == 2
    assert nodes[2].said.content == ""


def test_a_session_whose_last_answer_fills_the_row_ends_by_its_length():
    with agents(_asks, lambda context, seed: "long", max_tokens=3) as played:
        result = played.play()
    assert _ended(result) == ["length"]
    assert result.batch["truncated"].tolist() == [True]
    with agents(_asks, lambda context, seed: "lo", max_tokens=3) as played:
        assert _ended(played.play()) == ["stop"]


def test_a_client_that_leaves_after_its_retry_has_come_leaves_no_request_unclaimed():
    with _Open() as session:
        rollout = session.agents.rollout
        play, node, *_ = rollout.ask(session.key, asked({"messages": HI}), "m", False)
        assert rollout.ask(session.key, asked({"messages": HI}), "m", True)[1] is node
        rollout.leave(play, node)
        assert node.is_claimed
        rollout.leave(play, node)
        assert not node.is_claimed
