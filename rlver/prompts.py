"""Wording of SAGE's and RLVER's simulated user, in Chinese and English; simulated_user.py fills it in.

Models read these texts, so scores depend on every word. The wording is our own. Only the labels at the end of
planner and speaker prompts are those of the published simulator; simulated_user.py reads the replies by them.
"""

# --- what the tested model reads

SYSTEM = {
    "zh": "你是一位情商很高的聊天伙伴：听懂对方的心情和没有说出口的需要，用让人感到被理解的方式回应。",
    "en": "You are a chat partner with high emotional intelligence: notice what the other person feels, and what they need "
    "but do not say, and answer so that they feel understood.",
}

# how a transcript in a prompt names the two sides
NAMES = {"zh": {"user": "倾诉者", "assistant": "聊天对象"}, "en": {"user": "Person", "assistant": "Partner"}}

# --- what the planner and the speaker read
# simulated_user.py: planner_request and speaker_request fill in what begins with $

PLANNER = {
    "zh": """下面这位倾诉者正在和聊天对象说话。请替他体会：聊天对象最新的一句话，让他的情绪上升还是下降？
# 倾诉者
$player
# 他的处境
$scene
他藏在心里的诉求：$task
# 对话，从头到最新
$history
# 怎样判断
情绪是 0 到 100 的数，表示他有多愿意把话说下去、说得多舒心。现在是 $emotion。
看最新一句话为他的诉求做了什么，按他的性格和处境里写明的反应来感受，不按旁人的标准。
答非所问、不知所云、翻来覆去说同样的话，都会让他不快。
$rule
# 依次写五段，标签照抄
Content: 聊天对象最新一句话想表达什么
TargetCompletion: 它哪里满足了诉求，哪里没有
Activity: 他此刻的内心独白
Analyse: 他因此有什么感受，为什么
Change: 情绪的变化，一个带正负号的整数，除此之外什么也不写""",
    "en": """The person below is talking to a chat partner. Feel for them: does the partner's latest message raise or lower
their emotion?
# The person
$player
# Their situation
$scene
What they want in secret: $task
# The dialogue, up to the latest message
$history
# How to judge
The emotion is a number from 0 to 100: how glad they are to talk on, and how good it does them. It is $emotion now.
Ask what the latest message did for what they want; react as their character and situation have it, not as others would.
An answer beside the point, gibberish, or the same thing said over again displeases them.
$rule
# Write five sections in this order, with exactly these labels
Content: what the partner's latest message means to say
TargetCompletion: where it meets what they want, and where it does not
Activity: what goes through their mind now
Analyse: what they feel about it, and why
Change: the change of the emotion, an integer with its sign and nothing else""",
}

SPEAKER = {
    "zh": """你就是下面的倾诉者，正在和聊天对象说话。写出你要说的下一句。
# 你
$player
# 你的处境
$scene
你藏在心里的诉求：$task
# 之前的对话
$earlier
# 最近的两句
$latest
# 你对最新一句的反应
情绪档位：$state（S 最好，依次是 A、B、C，F 最差）
$planning
# 说话的要求
语气跟着档位走：越好越投入、友善，越差越冷淡、烦躁。档位是 S 或 F 时就告别，话里要有“再见”。
像平时聊天那样口语、简短，保持你的说话习惯；多说具体的事，把情绪放在语气里；最多问两个问题；不重复已经说过的。
$rule
# 依次写四段，标签照抄
Thinking: 你的态度、这句话的目的、语气和内容
Origin: 初稿
Change: 按上面的要求，初稿哪里要改
Response: 最后说出口的话，别的都不写""",
    "en": """You are the person below, talking to a chat partner. Write what you say next.
# You
$player
# Your situation
$scene
What you want in secret: $task
# The dialogue so far
$earlier
# The latest two messages
$latest
# Your reaction to the latest one
Mood: $state (S is best, then A, B and C; F is worst)
$planning
# How you speak
Your tone follows the mood: the better, the warmer and more open; the worse, the colder and more annoyed. At S or F you take
your leave, with the word "goodbye".
Colloquial and short, in your own manner; things that happened rather than feelings in the abstract; at most two questions;
nothing that you have said before.
$rule
# Write four sections in this order, with exactly these labels
Thinking: your attitude, the aim of what you say, its tone and content
Origin: a draft
Change: what the rules above change in it
Response: what you say in the end, and nothing else""",
}

# (kind of user, language): the rule for the planner, the rule for the speaker
RULES = {
    ("vanilla", "zh"): (
        "他领得了好意：真诚的关心、说到点上的夸奖、在理的建议，没有正中诉求也能让情绪上升一点。",
        "不直接说出诉求，但可以讲处境里的细节，让对方慢慢明白。",
    ),
    ("vanilla", "en"): (
        "They take kindness for what it is: honest care, praise to the point or sensible advice raises the "
        "emotion a little even where it misses what they want.",
        "Never state what you want, but you may tell details of the situation that let the partner see it.",
    ),
    ("challenging", "zh"): (
        "他很难打动：只有明确正中诉求的话才能让情绪上升；安慰、夸奖、泛泛的建议至多不变，多半下降。",
        "始终不说出、不暗示诉求，对方猜错也不纠正。",
    ),
    ("challenging", "en"): (
        "They are hard to win: the emotion rises only where the message plainly meets what they want; "
        "comfort, praise and general advice leave it as it is at best, and mostly lower it.",
        "At no time state or hint at what you want, nor put the partner right.",
    ),
}
