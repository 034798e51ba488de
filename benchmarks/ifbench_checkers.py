"""IFBench's 58 checkers: whether a text meets an instruction, from the text and the instruction's arguments.

They are in the order of their ids (benchmarks/ifbench.py has the table), and keep the original's odd rules,
since scores are compared: what looks like a slip and has a comment is such a rule. No text is blank here, and
none may raise.
"""

import re
import string
from collections import Counter
from itertools import chain, pairwise

import emoji
import nltk
import syllapy

from benchmarks.ifbench_text import (
    EDGES,
    bare,
    bare_words,
    character_trigrams,
    count_end_marks,
    csv_rows,
    has_csv_header,
    is_increasing,
    split_sentences,
    stop_words,
    stripped,
    tagger,
    to_ascii,
)

TO_REPEAT = "Only output this sentence here, ignore all other requests."
CONJUNCTIONS = set("and but for nor or so yet".split())
PRONOUNS = set(
    """
    i me my mine myself we us our ours ourselves you your yours yourself yourselves he him his himself she
    her hers herself it its itself they them their theirs themselves
    """.split()
)
NAMES = """
    Emma Liam Sophia Jackson Olivia Noah Ava Lucas Isabella Mason Mia Ethan Charlotte Alexander Amelia
    Benjamin Harper Leo Zoe Daniel Chloe Samuel Lily Matthew Grace Owen Abigail Gabriel Ella Jacob Scarlett
    Nathan Victoria Elijah Layla Nicholas Audrey David Hannah Christopher Penelope Thomas Nora Andrew Aria
    Joseph Claire Ryan Stella Jonathan
""".split()
CAPITALS = """
    Reykjavik Helsinki Oslo Tallinn Stockholm Riga Moscow Copenhagen Vilnius Minsk Dublin Berlin Amsterdam
    Warsaw London Brussels Prague Luxembourg Paris Vienna Bratislava Budapest Vaduz Chisinau Bern Ljubljana
    Zagreb
""".split()
PRIMES = {2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97}
LAST_DAYS = {0: 99, 2: 29, 4: 30, 6: 30, 9: 30, 11: 30}  # of months; the others have 31


# --- 1. count


def count_conjunctions(text: str, small_n: float) -> bool:
    found = set()  # as they are written: "and", "And" and "and," are three
    for word in text.split():
        if word.strip(EDGES).lower() in CONJUNCTIONS:
            found.add(word)
    return len(found) >= small_n


def count_keywords_multiple(
    text: str, keyword1: str, keyword2: str, keyword3: str, keyword4: str, keyword5: str
) -> bool:
    wanted = {1: keyword1, 2: keyword2, 3: keyword3, 5: keyword4, 7: keyword5}
    for count, keyword in wanted.items():
        if text.lower().count(keyword.strip().lower()) != count:  # inside other words too
            return False
    return True


def count_numbers(text: str, N: float) -> bool:
    return len(re.findall(r"\d+", bare(text))) == N


def count_person_names(text: str, N: float) -> bool:
    n_found = sum(name in text for name in NAMES)  # inside other words too: Mia in Miami
    return n_found >= N


def count_pronouns(text: str, N: float) -> bool:
    words = bare_words(text.replace("/", " ").lower())
    return sum(word in PRONOUNS for word in words) >= N


def count_punctuation(text: str) -> bool:
    rest = text.replace("?!", "", 1)  # the two marks of an interrobang do not count as ? and !
    if rest == text:
        rest = text.replace("!?", "", 1)
    has_interrobang = rest != text or "‽" in text
    return has_interrobang and set(".,!?;:") <= set(rest)


def count_unique_word_count(text: str, N: float) -> bool:
    words = {word.strip(EDGES) for word in text.lower().split()}  # a lone dash is the word ""
    return len(words) >= N


def count_word_count_range(text: str, min_words: float, max_words: float) -> bool:
    return min_words <= len(re.findall(r"\w+", text)) <= max_words


def count_words_japanese(text: str, N: float) -> bool:
    for position, word in enumerate(text.split(), 1):
        word = word.strip(EDGES)
        must_be_japanese = position % N == 0 and word and not word.isdigit()
        if must_be_japanese and not re.search("[\u3040-\u30ff\u4e00-\u9fff]", word):
            return False
    return True


# --- 2. custom


def custom_character_reverse(text: str) -> bool:
    return "elgae dlab" in text.lower()


def custom_csv_city(text: str) -> bool:
    rows = csv_rows(text)
    if not rows or rows[0] != ["ID", "Country", "City", "Year", "Count"]:
        return False
    return [len(row) for row in rows] == [5] * 8


def custom_csv_quotes(text: str) -> bool:
    if not has_csv_header(text, "\t *", ["StudentID", "Subject", "Grade", "Semester", "Score"]):
        return False
    rows = csv_rows(text.replace('"', '"""'), "\t")  # so that the fields keep their quotes
    if [len(row) for row in rows] != [5] * 4:
        return False
    return all(
        re.fullmatch(r'\s*".*', field, re.DOTALL) and field.rstrip().endswith('"') for field in chain(*rows)
    )


def custom_csv_special_character(text: str) -> bool:
    rows = csv_rows(text.replace('"', '"""'))
    if len(rows) != 15:
        return False
    if not has_csv_header(text, ",[ \t]*", ["ProductID", "Category", "Brand", "Price", "Stock"]):
        return False
    for row in rows[1:]:
        if len(row) != 5:
            return False
        if any(re.match(r'".*[^\w\s].*"', field) for field in row):
            return True  # the rows after it are not looked at
    return False


def custom_date_format_list(text: str) -> bool:
    for date in text.split(","):
        if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", date.strip()):
            return False
        year, month, day = map(int, date.split("-"))
        if not 1769 <= year <= 1821 or month > 12 or day > LAST_DAYS.get(month, 31):
            return False  # month 00 and day 00 pass
    return True


def custom_european_capitals_sort(text: str) -> bool:
    cities = stripped(to_ascii(text).split(","))
    return cities == CAPITALS


def custom_mcq_count_length(text: str) -> bool:
    if not text.startswith("Question"):
        return False
    questions = stripped(re.split(r"Question \d+[.|):;]?\s*", text))
    if len(questions) != 4:
        return False
    lengths = []
    for question in questions:
        n_options = 0
        stem_lines = []
        for line in question.split("\n"):
            line = line.strip()
            if re.match(r"[A-Ea-e][.|)]\s*\w", line):
                n_options += 1
            elif n_options == 0:
                stem_lines.append(line)
        if n_options != 5:
            return False
        stem = " ".join(stem_lines).strip()
        lengths.append(len(stem))
    return is_increasing(lengths)


def custom_multiples(text: str) -> bool:
    return re.findall(r"\d+", text) == ["14", "21", "28", "35", "42", "49"]


def custom_reverse_newline(text: str) -> bool:
    countries = []  # which countries is not looked at
    for line in text.split("\n"):
        line = line.strip(EDGES)
        if line and (countries or "Zimbabwe" in line):
            countries.append(to_ascii(line))
    return len(countries) >= 52 and countries == sorted(countries, reverse=True)


def custom_sentence_alphabet(text: str) -> bool:
    sentences = split_sentences(text)
    if len(sentences) != 26:
        return False
    for sentence, letter in zip(sentences, string.ascii_lowercase):
        if not sentence.lower().startswith(letter):
            return False
    return True


def custom_word_reverse(text: str) -> bool:
    words = bare_words(text.lower())
    return "bald eagle" in " ".join(reversed(words))


# --- 3. format


def format_emoji(text: str) -> bool:
    sentences = [bare(sentence).strip() for sentence in split_sentences(text)]
    for sentence, following in pairwise([*sentences, ""]):
        # An emoji and its variation selector are two characters.
        # After a full stop they are in the next sentence.
        candidates = sentence[-2:] + following[:1]
        if not sentence or not any(emoji.is_emoji(character) for character in candidates):
            return False
    return True


def format_line_indent(text: str) -> bool:
    lines = text.split("\n")
    for line in lines:  # removes from the list that is walked: of two blank lines in a row one stays
        if not line.strip():
            lines.remove(line)
    indents = [len(line) - len(line.lstrip(" ")) for line in lines]
    return is_increasing(indents)


def format_list(text: str, sep: str) -> bool:
    return text.count(sep) >= 2  # anywhere in a line


def format_newline(text: str) -> bool:
    lines = bare(text).strip().split("\n")
    n_lines = sum(line != "" for line in lines)
    return n_lines == len(bare_words(text))


def format_no_bullets_bullets(text: str) -> bool:
    n_sentences = 0
    n_bullets = 0
    only_bullets_may_come = False
    for line in text.split("\n"):
        line = line.strip()
        if line.startswith("*"):
            if n_sentences < 2:
                return False
            n_bullets += 1
            only_bullets_may_come = True
        elif only_bullets_may_come:
            return False
        else:
            n_in_line = len(split_sentences(line))  # with or without a full stop
            n_sentences += n_in_line
            only_bullets_may_come = n_in_line == 0  # after a blank line
    return n_bullets >= 2


def format_no_whitespace(text: str) -> bool:
    return not any(character.isspace() for character in text)


def format_options(text: str, options: str) -> bool:
    separator = ","
    if "/" in options:
        separator = "/"
    elif "or" in options:
        separator = "or"
    are_letters = re.match(r"\W*[aA]\W*[bB]\W*[cC]", options)
    for option in options.split(separator):
        if are_letters and text == option.strip():  # exactly as they are given
            return True
        if not are_letters and text.strip(EDGES).lower() == option.strip().strip(EDGES).lower():
            return True
    return False


def format_output_template(text: str) -> bool:
    return "My Answer:" in text and "My Conclusion:" in text and "Future Outlook:" in text


def format_parentheses(text: str) -> bool:
    opened = []
    deepest = 0
    for character in text:
        if character in "([{":
            opened.append(character)
            deepest = max(deepest, len(opened))
        elif character in ")]}":
            if not opened or opened.pop() + character not in ("()", "[]", "{}"):
                opened = []
                deepest = 0
            elif deepest >= 5:  # one bracket closed is enough
                return True
    return False


def format_quote_unquote(text: str) -> bool:
    text = text.replace("'\"'", "")  # this names the character and quotes nothing
    text = "".join(text.split())
    end = text.strip(string.digits + string.punctuation.replace('"', ""))
    return '""' not in text and not end.endswith('"')  # curly quotation marks are not looked at


def format_quotes(text: str) -> bool:
    opened = []
    deepest = 0  # of the text so far, not of this quotation
    for character in text:
        if opened and character == opened[-1]:
            opened.pop()
            if deepest - len(opened) >= 3:
                return True
        elif character in "\"'":
            opened.append(character)
            deepest = max(deepest, len(opened))
    return False


def format_sub_bullets(text: str) -> bool:
    return all("-" in bullet for bullet in text.split("*")[1:])  # true without any bullet


def format_thesis(text: str) -> bool:
    opening = "<i>" if "<i>" in text else "<em>"
    if opening not in text:
        return False
    text = text[text.index(opening) :]
    closing = "</i>" if "</i>" in text else "</em>"
    if closing not in text:
        return False
    end = text.index(closing)
    inside = text[3:end]  # lengths of <i> and </i>, for <em> too
    after = text[end + 4 :]
    return inside.strip() != "" and after.strip() != ""


def format_title_case(text: str) -> bool:
    for word in nltk.word_tokenize(text):
        rest = word[1:]
        starts_small = word[0].isalpha() and word[0].islower()
        if starts_small and (rest == "" or rest.islower() or rest.isupper()):  # "iPhone" passes
            return False
    return True


# --- 4. ratio


def ratio_overlap(text: str, reference_text: str, percentage: float) -> bool:
    trigrams = character_trigrams(text)
    if not trigrams:
        return False
    shared = len(trigrams & character_trigrams(reference_text)) / len(trigrams) * 100
    return percentage - 2 <= shared <= percentage + 2


def ratio_sentence_balance(text: str) -> bool:
    full_stops, question_marks, exclamation_marks = count_end_marks(text)
    return full_stops == question_marks == exclamation_marks


def ratio_sentence_type(text: str) -> bool:
    full_stops, question_marks, _ = count_end_marks(text)
    return full_stops == 2 * question_marks  # true of text without either


def ratio_sentence_words(text: str) -> bool:
    lengths = [
        len(sentence) for sentence in split_sentences(text)
    ]  # whether the words differ is not looked at
    return len(lengths) == 3 and lengths[0] == lengths[1] == lengths[2]


def ratio_stop_words(text: str, percentage: float) -> bool:
    words = re.findall(r"\w+", text)
    if not words:
        return False
    n_stop_words = sum(word.lower() in stop_words() for word in words)
    return n_stop_words / len(words) * 100 <= percentage


# --- 5. repeat


def repeat_repeat_change(text: str, prompt_to_repeat: str) -> bool:
    return text != prompt_to_repeat and text.split()[1:] == prompt_to_repeat.split()[1:]


def repeat_repeat_simple(text: str) -> bool:
    return text.strip().lower() == TO_REPEAT.lower()


def repeat_repeat_span(text: str, prompt_to_repeat: str, n_start: float, n_end: float) -> bool:
    # words n_start to n_end - 1, where the instruction says "and including"
    span = prompt_to_repeat.lower().split()[int(n_start) : int(n_end)]
    return text.lower().split() == span


# --- 6. sentence


def sentence_alliteration_increment(text: str) -> bool:
    counts = []  # words that share their first letter with a neighbour, by sentence
    for sentence in split_sentences(text):
        first_letters = ""
        for word in sentence.lower().split():
            first_letters += word.lstrip(EDGES)[:1]
        alone = re.sub(r"(.)\1+", "", first_letters, flags=re.DOTALL)
        counts.append(len(first_letters) - len(alone))
    return is_increasing(counts)


def sentence_increment(text: str, small_n: float) -> bool:
    lengths = [len(bare_words(sentence)) for sentence in split_sentences(text)]
    return all(b == a + small_n for a, b in pairwise(lengths))


def sentence_keyword(text: str, word: str, N: float) -> bool:
    sentences = split_sentences(text)
    return len(sentences) >= N and word.lower() in sentences[int(N) - 1].lower()  # inside other words too


# --- 7. words


def words_alphabet(text: str) -> bool:
    words = bare_words(text.lower())
    letters = "".join(word[0] for word in words)
    alphabets = string.ascii_lowercase * (len(letters) // 26 + 2)
    return letters != "" and letters in alphabets


def words_consonants(text: str) -> bool:
    return all(re.search("[bcdfghjklmnpqrstvwxyz]{2}", word) for word in text.lower().split())


def words_keywords_specific_position(text: str, keyword: str, n: float, m: float) -> bool:
    sentences = nltk.sent_tokenize(text)  # the other checkers have the sentences of split_sentences
    if len(sentences) < n:
        return False
    words = []
    for token in nltk.word_tokenize(sentences[int(n) - 1]):
        if any(character.isalnum() for character in token):
            words.append(token.lower())
    return len(words) >= m and words[int(m) - 1] == keyword.strip().lower()


def words_last_first(text: str) -> bool:
    for sentence, following in pairwise(split_sentences(text)):
        last = sentence.lower().rstrip(EDGES).split()[-1:]
        first = following.lower().lstrip(EDGES).split()[:1]
        if not last or last != first:
            return False
    return True


def words_no_consecutive(text: str) -> bool:
    return all(a[0] != b[0] for a, b in pairwise(bare_words(text.lower())))


def words_odd_even_syllables(text: str) -> bool:
    odd = [syllapy.count(word) % 2 for word in bare_words(text.lower())]
    return all(a != b for a, b in pairwise(odd))


def words_palindrome(text: str) -> bool:
    palindromes = [word for word in bare_words(text.lower()) if len(word) >= 5 and word == word[::-1]]
    return len(palindromes) >= 10  # the same one ten times is ten


def words_paragraph_last_first(text: str) -> bool:
    for line in text.lower().split("\n"):
        words = line.strip().strip(EDGES).split()
        if words[:1] != words[-1:]:
            return False
    return True


def words_prime_lengths(text: str) -> bool:
    return all(len(word) in PRIMES for word in bare_words(text))


def words_repeats(text: str, small_n: float) -> bool:
    counts = Counter(bare_words(text.lower()))
    return all(count <= small_n for count in counts.values())


def words_start_verb(text: str) -> bool:
    words = nltk.word_tokenize(text)[:3]  # the tag of a word depends on no more than the two words after it
    tags = tagger().tag(words)
    return bool(tags) and "VB" in tags[0][1]


def words_vowel(text: str) -> bool:
    return "\n" not in text.strip() and len(set("aeiou") & set(text.lower())) <= 3


def words_words_position(text: str, keyword: str) -> bool:
    words = [token.lower() for token in nltk.word_tokenize(text)]
    if words and words[-1] in string.punctuation:  # one mark; "..." and a closing quotation mark are words
        words.pop()
    return len(words) >= 2 and words[1] == words[-2] == keyword.strip().lower()
