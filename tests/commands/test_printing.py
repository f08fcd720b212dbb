from joma.commands import printing


def test_a_long_message_loses_its_middle(capsys):
    printing.print_error("a" * 100_000 + " the end")
    line = capsys.readouterr().err
    assert len(line) < printing.MAX_LINE + 20
    assert line.endswith("a the end\n")


def test_what_is_printed_has_no_control_characters(capsys):
    printing.write_line("a\x1b[2Jb")
    printing.print_json(["\x9b2J"])
    assert capsys.readouterr().out == 'a\\x1b[2Jb\n[\n  "\\u009b2J"\n]\n'
