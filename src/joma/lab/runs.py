# A cell shows its last expression, which is therefore not unused.
# pyright: reportUnusedExpression=false
"""Page *Runs*: open a folder of runs and sweeps, draw any variable over any dimension, and read the claims."""

import marimo

app = marimo.App(width="medium", app_title="Runs")

with app.setup(hide_code=True):
    from functools import lru_cache
    from pathlib import Path

    import marimo as mo
    import numpy as np

    import joma
    from joma import drawing
    from joma.arguments import InputError
    from joma.files import StorageError
    from joma.lab import presenting
    from joma.runs import find_runs, read_claims, read_config
    from joma.sweeps import find_sweeps

    SERIES, AXES = 6, ("step", "time")
    CODE = """\
import joma

paths = {paths}
datasets = [joma.{call}(path) for path in paths]
curves = [data[{variable!r}].isel({selection}) for data in datasets if {variable!r} in data]
curves = [curve.transpose({dim!r}, ...) for curve in curves]  # over {dims}
"""


@app.cell(hide_code=True)
def _():
    mo.md(r"""
    # Runs

    A run is one labelled Dataset with a config, claims and their verdicts. Give the folder that `joma run --out` or
    `joma sweep` wrote to (in a checkout of the repository, `docs/runs` has one run of each study), choose runs, a
    variable, the dimension along which to draw it, and one that gives a line to each of its labels. Lines are the mean
    over seeds, $\bar y = \frac1n\sum_s y_s$; bands go from the lowest to the highest seed.
    """)
    return


@app.cell(hide_code=True)
def _():
    folder = mo.ui.text(value="runs", label="Folder", full_width=True)
    folder
    return (folder,)


@app.function(hide_code=True)
def entries(folder):
    """Return the runs and sweeps below a folder by a short name; raise `InputError` if it has none."""
    home = Path(folder).expanduser()
    paths = next(filter(None, (find_runs(home, depth) for depth in range(3))), []) if folder.strip() else []
    names = {f"{path.parent.name}/{path.name}": path for path in paths}
    names |= {
        f"sweep of {path.parent.name}/{path.name}": path for path in (find_sweeps(home) if folder.strip() else [])
    }
    if not names:
        remedy = "give a folder that `joma run --out` wrote to"
        raise InputError("folder", "one with runs or sweeps below it", repr(folder), remedy)
    return names


@app.cell(hide_code=True)
def _(folder):
    try:
        known, _trouble = entries(folder.value), None
    except (InputError, StorageError, OSError) as error:
        known, _trouble = {}, error
    chosen = mo.ui.multiselect(
        [*known], value=[*known][:1], label="Runs, to compare", max_selections=3, full_width=True
    )
    chosen if _trouble is None else presenting.problem(_trouble)
    return chosen, known


@app.function(hide_code=True)
@lru_cache(maxsize=8)
def opened(path):
    """Open a run or a sweep as one Dataset."""
    return joma.open_sweep(path) if is_sweep(path) else joma.open_run(path)


@app.function(hide_code=True)
def is_sweep(path):
    """Return whether this is the folder of a sweep."""
    return Path(path).parent.parent.name == "sweeps"


@app.function(hide_code=True)
def drawable(data):
    """Return the names of the variables that are numbers along at least one dimension besides the seed."""
    return [
        str(name)
        for name, values in data.data_vars.items()
        if values.dtype.kind in "fiub" and {*values.dims} - {"seed"}
    ]


@app.cell(hide_code=True)
def _(chosen, known):
    datasets, damaged = {}, []
    for _name in chosen.value:
        try:
            datasets[_name] = opened(str(known[_name]))
        except (InputError, StorageError, OSError) as error:
            damaged.append(presenting.problem(error))
    _names = drawable(next(iter(datasets.values()))) if datasets else []
    variable = mo.ui.dropdown(_names, value=_names[0] if _names else None, label="Variable")
    mo.vstack([*damaged, variable] if _names else damaged)
    return datasets, variable


@app.function(hide_code=True)
def usual_axis(values):
    """Return the dimension that a variable is usually drawn along: steps, times, or its longest."""
    dims = [str(dim) for dim in values.dims if dim != "seed"]
    return next((dim for dim in AXES if dim in dims), max(dims, key=lambda dim: values.sizes[dim]))


@app.cell(hide_code=True)
def _(datasets, variable):
    if variable.value is not None:
        shown = next(iter(datasets.values()))[variable.value]
        _dims = [str(dim) for dim in shown.dims if dim != "seed"]
        along = mo.ui.dropdown(_dims, value=usual_axis(shown), label="along", allow_select_none=False)
        apart = mo.ui.dropdown(_dims, label="a line for each", allow_select_none=True)
        logarithmic = mo.ui.checkbox(label="logarithmic")
        _view = mo.hstack([along, apart, logarithmic], justify="start", wrap=True, gap=1.5)
    else:
        shown = along = apart = logarithmic = None
        _view = mo.md("*Choose a run.*")
    _view
    return along, apart, logarithmic, shown


@app.cell(hide_code=True)
def _(along, apart, shown):
    _sizes = {} if shown is None else {str(dim): size for dim, size in shown.sizes.items() if size > 1}
    _rest = [dim for dim in _sizes if dim not in ("seed", along.value, apart.value)]
    places = mo.ui.dictionary(
        {dim: mo.ui.slider(0, _sizes[dim] - 1, 1, label=f"`{dim}`", show_value=True) for dim in _rest}
    )
    mo.hstack(list(places.elements.values()), justify="start", wrap=True, gap=2)
    return (places,)


@app.function(hide_code=True)
def curves(datasets, variable, dim, line, places):
    """Return the curves to draw by their names: each run's values along `dim`, for each label of `line`."""
    lines = {}
    for name, data in datasets.items():
        if variable not in data or dim not in data[variable].dims:
            continue
        values = data[variable]
        rest = {other: min(places.get(str(other), 0), values.sizes[other] - 1) for other in values.dims}
        values = values.isel({other: place for other, place in rest.items() if other not in ("seed", dim, line)})
        prefix = name if len(datasets) > 1 else ""
        if line is None or line not in values.dims:
            lines[prefix or variable] = values
            continue
        for index in drawing.evenly_spaced(values.sizes[line], SERIES):
            label = values[line].values[index] if line in values.coords else index
            lines[f"{prefix} {line} {label}".strip()] = values.isel({line: index})
    return lines


@app.function(hide_code=True)
@drawing.style()
def draw(chosen_curves, variable, dim, logarithmic):
    """Draw each curve as a line, with a band over seeds."""
    figure, axes = drawing.fixed_canvas(1, 1, width=9.0, height=3.6)
    panel = axes[0, 0]
    for index, (label, values) in enumerate([*chosen_curves.items()][:SERIES]):
        positions = values[dim].values if dim in values.coords else np.arange(values.sizes[dim])
        named = positions.dtype.kind not in "fiu"
        x = np.arange(len(positions)) if named else positions
        if "seed" in values.dims:
            drawing.band(panel, x, values.transpose("seed", dim), index, label)
        else:
            drawing.theory(panel, x, values.values, index, label)
        if named:
            panel.set_xticks(x[:40], [str(position) for position in positions[:40]])
    panel.set(title=f"{variable} along {dim}", xlabel=dim, ylabel=variable)
    if logarithmic:
        panel.set_yscale("log")
    panel.legend(loc="best", ncols=2)
    return figure


@app.cell(hide_code=True)
def _(along, apart, datasets, known, logarithmic, places, shown, variable):
    if shown is not None:
        _dim, _line = along.value, apart.value if apart.value != along.value else None
        selected = curves(datasets, variable.value, _dim, _line, places.value)
        _where = {dim: int(place) for dim, place in places.value.items()}
        _labels = ", ".join(f"{dim} {shown[dim].values[place]}" for dim, place in _where.items() if dim in shown.coords)
        _count = f"{len(selected)} line{'s' * (len(selected) != 1)}"
        sentence = f"{variable.value} along {_dim}, {_count}" + (f", at {_labels}." if _labels else ".")
        code = CODE.format(
            paths=[str(known[name]) for name in datasets],
            call="open_sweep" if any(is_sweep(known[name]) for name in datasets) else "open_run",
            variable=variable.value,
            selection=", ".join(f"{dim}={place}" for dim, place in _where.items()),
            dim=_dim,
            dims=" and ".join(dict.fromkeys([_dim, *([_line] if _line else []), *({"seed"} & {*shown.dims})])),
        )
        _view = mo.vstack(
            [
                presenting.picture(draw(selected, variable.value, _dim, logarithmic.value), sentence),
                mo.md(sentence),
            ]
        )
    else:
        selected, sentence, code, _view = {}, "", "", mo.md("")
    _view
    return code, selected, sentence


@app.function(hide_code=True)
def claim_rows(name, path):
    """Return the claims of a run as rows of a table, those that do not hold first."""
    preset = read_config(path)["preset"]
    order = {"does not hold": 0, "holds": 1, "not tested": 2}
    claims = sorted(read_claims(path).claims, key=lambda claim: order[claim["verdict"]])
    return [
        {
            "run": f"{name} ({preset})",
            "verdict": claim["verdict"],
            "claim": claim["statement"],
            "kind": claim["kind"],
            "mean": "" if claim["measured"]["mean"] is None else f"{claim['measured']['mean']:.4g}",
            "expected": claim["expected"],
        }
        for claim in claims
    ]


@app.cell(hide_code=True)
def _(datasets, known):
    claims = [row for name in datasets if not is_sweep(known[name]) for row in claim_rows(name, known[name])]
    mo.ui.table(claims, selection=None, page_size=12, label="Claims", wrapped_columns=["claim"]) if claims else None
    return (claims,)


@app.cell(hide_code=True)
def _(code):
    presenting.copy_as_python(code)
    return


@app.cell(hide_code=True)
def _():
    presenting.read_on(
        functions="joma.open_run joma.open_sweep", documents="docs/runs/README.md docs/sweeps.md docs/tutorial.md"
    )
    return


if __name__ == "__main__":
    app.run()
