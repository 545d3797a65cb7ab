"""What the demo asks: a few questions about each of three texts, and one about nothing of them.

The texts are long, because only whole KV blocks are shared: 128 tokens each on CPU engines. All
of them are made up.
"""

from __future__ import annotations

from typing import Any

QUESTION_WITHOUT_TEXT = 'What is the capital of France?'
ITS_ANSWER = 'Paris'

TEXTS = {
    'history': """\
The Harrow Bay Lantern Company was founded in 1871 by two sisters, Ada and Miriam Colwell, in
the small harbor town of Harrow Bay. Their father had kept the lighthouse at Gull Point for
thirty years, and the sisters had learned from him how to trim a wick, grind a lens and mend a
clockwork. Their first product was a brass lantern for fishing boats. It weighed four pounds,
burned whale oil, and could be read by at a distance of ten feet. In the first year the company
sold sixty of them, all to boats of the same harbor.
In 1889 a storm destroyed the workshop on the pier. Nobody was hurt, but every tool was lost.
The town lent the sisters an empty grain mill on Orchard Street, and the company has worked in
that mill ever since. The mill had a water wheel, which Miriam used to drive the first lathe of
the county. With the lathe a lens could be ground in two days in place of nine.
Ada Colwell retired in 1904 and was followed by her nephew, Thomas Reed, who had studied
chemistry. Thomas replaced whale oil with kerosene, and he painted every lantern dark green, a
color that the company still uses. During his time the company grew from eleven workers to
ninety. He also opened a school for apprentices, where boys and girls learned together, which
was unusual in those days.
Electric light nearly ended the company. In 1931 only seven workers were left. It was saved by
the railway, which ordered two thousand signal lanterns that had to work without any wire. Today
the Harrow Bay Lantern Company makes lanterns for museums, for film studios and for people who
like to read outdoors. The railway lantern, called the Number Seven, is still its best known
product.""",
    'workshop': """\
These are the rules of the workshop on Orchard Street. They hang beside the door, and every
worker and every guest reads them before going in.
The workshop opens at seven in the morning and closes at four in the afternoon. On Fridays it
closes at noon, so that the floor can be washed. The key is kept by the foreman, Walter Pike. If
Walter is away, the key is kept by the office on the second floor.
Wear leather boots and safety glasses at all times. Gloves are worn at the furnace and never at
the lathe, because the lathe may catch them. Long hair is tied back. Scarves and rings are left
in the wooden box at the door.
The furnace is lit by two people together, never by one alone. It needs forty minutes to become
hot enough for brass. A red lamp on the wall shows that it is hot. Nobody leaves the furnace room
while the red lamp is on. Buckets of dry sand stand on both sides of the furnace. Water is never
used on hot metal.
Lenses are ground in the north room, where the light is even. A finished lens is washed in warm
water, dried with linen, and held against the window. A lens with a bubble is put on the blue
shelf and melted again. A lens without a fault is wrapped in paper, marked with the date, and put
on the white shelf. No more than twelve lenses are put on one shelf.
Paint is mixed in the yard. The dark green of the company is made of three parts of green, one
part of black and a spoon of linseed oil. It dries for two days. A lantern is packed only when
the paint no longer smells.
Whoever finds a broken tool hangs a yellow ribbon on it and tells the foreman. Guests are
welcome on Tuesdays. They stay behind the rope, and they are given tea at the end.""",
    'shop': """\
This is how the shop of the Harrow Bay Lantern Company takes and sends orders. It is meant for
new clerks, who should keep it at hand in their first weeks.
An order may come by letter, by telephone or from the counter. Write it into the large red book
with the name of the customer, the street, the lantern and the day. Give the customer a number.
The first order of each year has the number one. Never promise a day before you have looked at
the shelf.
There are three lanterns in the shop. The Harbor is the small one and costs forty dollars. The
Number Seven is the railway lantern and costs ninety dollars. The Gull Point is the large one,
with two lenses, and costs two hundred dollars. Spare glass costs five dollars for any lantern. A
bottle of kerosene is not sold, but the hardware store across the street has it.
Parcels leave the shop on Mondays and Thursdays. The driver is Helen Marsh, and her truck comes
at nine. A parcel within the county arrives on the next day. A parcel to any other place takes
five days. Each lantern is packed in straw, in a box of pine, and the glass is packed on its own.
Put a card into the box with the name of the person who packed it.
A customer may return a lantern within sixty days. The money is paid back if the lantern is
whole. If the glass broke on the way, send new glass at once and ask for nothing. Write every
return into the small black book.
Repairs are free for ten years. After ten years a repair costs fifteen dollars, whatever is
broken. Old lanterns are always welcome: if somebody brings one that was made before 1900, call
the manager, because the museum in town pays well for it.
The shop is closed on Sundays, and in the first week of August, when the whole town goes
sailing.""",
}

QUESTIONS = {
    'history': (
        'Who founded the company?',
        'In which year did a storm destroy the workshop?',
        'What color are the lanterns painted?',
        'What saved the company in 1931?',
    ),
    'workshop': (
        'When does the workshop open in the morning?',
        'Who keeps the key?',
        'What must never be worn at the lathe?',
        'On which day are guests welcome?',
    ),
    'shop': (
        'How much does the Number Seven cost?',
        'Who is the driver of the truck?',
        'Within how many days may a customer return a lantern?',
        'When is the shop closed?',
    ),
}


def rows() -> list[dict[str, Any]]:
    """The questions, those about one text apart from each other, as a shuffled file has them."""
    by_text = [[_row(text, question) for question in QUESTIONS[text]] for text in TEXTS]
    mixed = [row for turn in zip(*by_text, strict=True) for row in turn]
    return [_row('', QUESTION_WITHOUT_TEXT), *mixed]


def _row(text: str, question: str) -> dict[str, Any]:
    content = f'{TEXTS[text]}\n\n{question} Answer in one sentence.' if text else question
    return {
        'text': text,
        'question': question,
        'messages': [{'role': 'user', 'content': content}],
    }
