from hypothesis import given
from hypothesis import strategies as st
from kvplane.engine import tokenizer

words = st.lists(
    st.integers(tokenizer.FIRST_WORD, tokenizer.VOCAB_SIZE - 1), min_size=1, max_size=20
)


@given(st.text())
def test_any_text_comes_back(text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(words)
def test_generated_tokens_split_back_into_themselves(ids):
    assert tokenizer.encode(tokenizer.decode(ids)) == ids


@given(st.text(), words, st.text())
def test_text_that_only_appends_gives_ids_that_only_append(before, ids, after):
    end = tokenizer.encode("<|im_end|>" + after)
    whole = before + tokenizer.decode(ids) + "<|im_end|>" + after
    assert tokenizer.encode(whole) == tokenizer.encode(before) + ids + end


def test_words_are_one_token_and_special_tokens_too():
    assert tokenizer.encode("a bako") == [97, tokenizer.word_id(" bako")]
    assert tokenizer.encode("<|im_start|>") == [257]
    assert tokenizer.token_strings([97, tokenizer.word_id(" zuzu")]) == ["a", " zuzu"]
    assert tokenizer.word_id(" zuzu") == tokenizer.VOCAB_SIZE - 1
