"""IFBench: which of a task's instructions a response meets, strict and loose.

The rules are those of allenai/IFBench, written anew. They give the published results of every sample response
at hand, and agree with all 162 unit cases of these checkers at commit db69a6f (August 2026). Four
instructions have the rules of that commit: words:keywords_specific_position, words:words_position,
format:quote_unquote and format:title_case. The others have those of c94da02 (October 2025). What changed
since is left out there: sentences by NLTK, whole-word names and keywords, more pronouns, and spans by
characters although the prompts ask for words. With the sentences of db69a6f one published result would be
another.

princeton-pli/RLMT, the source of the paper's numbers, has the older rules for all four. It has others for
repeat:repeat_change (characters, not words) and words:paragraph_last_first (a blank line fails).

1. A response of white space only meets nothing. Nor does one on which the original stops with an exception.
2. Loose: any of 8 variants passes. They are the response, and the response without its first line, its last,
   or both; each of them also without every *.
3. Our choice: `repeat:repeat_span` from word 0 starts at word 0; the original starts at a random word there.

Needs emoji, syllapy, and nltk with its data:

    python -m nltk.downloader punkt_tab stopwords averaged_perceptron_tagger_eng
"""

from types import FunctionType

from benchmarks import ifbench_checkers

CHECKERS = {}  # count_numbers checks count:numbers
for name, function in vars(ifbench_checkers).items():
    if isinstance(function, FunctionType) and function.__module__ == ifbench_checkers.__name__:
        CHECKERS[name.replace("_", ":", 1)] = function
CHECKERS["format:sub-bullets"] = CHECKERS.pop("format:sub_bullets")
