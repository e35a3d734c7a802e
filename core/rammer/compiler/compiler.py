"""The compiler's pipeline: Graph -> ComputeGraph -> TileGraph -> RKernels -> RProgram, segment by segment. Each step is
independent of the device: it uses only the backend's VDevice, candidates and kernels."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Final

from rammer.compile_options import DEFAULT, MEASURED, CompileOptions, Progress, ignore_progress
from rammer.compiled.segments import Compiled, ProgramSegment, Segment
from rammer.compiler.compile_loops import (
    DynamicSteps,
    LoopSteps,
    check_one,
    in_common,
    make_fallback_segment,
    open_layers,
    open_programs,
    ports_of,
)
from rammer.compiler.form_choice import FormChooser
from rammer.compiler.length_variants import verify_tables, with_cases
from rammer.compiler.policy_choice import OPEN_LENGTHS, Chooser, build_legal_programs, tuned_or_not
from rammer.debug import DECISIONS, PROGRAMS, STEPS, print_debug
from rammer.device.loader import Registry
from rammer.device.manifest import Backend, Binding, FusedForm, reused_constants
from rammer.errors import DeviceFailure, attribute_errors
from rammer.frontend.bind.binder import bind_until
from rammer.frontend.bind.partition import SubgraphIndex
from rammer.frontend.bind.partition import split_segments as split_segments  # re-exported for plugins and tests
from rammer.frontend.lower.graph_lowering import Lowerings, lower
from rammer.frontend.lower.lowering_registry import REGISTRY
from rammer.frontend.ranges.dimension_ranges import ProbedModel, shapes_at
from rammer.frontend.ranges.kv_cache import Appended, append_in_place, merge_ended
from rammer.frontend.ranges.length_fit import LengthFit
from rammer.frontend.ranges.range_bounds import RangeBounds, ended_operators, interleave_tasks, with_batches
from rammer.frontend.read.reader import Model
from rammer.fusion.connect import connect
from rammer.fusion.fall_back import fall_back
from rammer.fusion.fusion_rules import FusionRule, apply_rule
from rammer.fusion.group_prices import CostModel, GroupPrices, static_operator
from rammer.fusion.stitch import stitch
from rammer.fusion.stitch_latency import Evaluator
from rammer.fusion.tile_graph import BatchTrial, CutTrial, TileGraph
from rammer.ir.collector import collector_paused
from rammer.ir.compute import ComputeGraph
from rammer.ir.extent import NO_STEPS, NONE, AffineExtent, NoRange, Point
from rammer.ir.graph import Graph, Node, Value
from rammer.ir.operator import RKernel, ROperator
from rammer.ir.program import Port, RProgram, Storage
from rammer.passes.compute.batch_decision import PartPricer, batch_where_it_pays
from rammer.passes.graph.convert_to_float16 import narrow_graph
from rammer.passes.pass_pipeline import (
    BATCH,
    OF_EQUALS,
    OF_EXTENTS,
    OF_MASKS,
    AnyPass,
    ComputeTarget,
    PassReport,
    Pipeline,
    default_passes,
)
from rammer.plan.constant_layout import order_constants
from rammer.plan.image_layout import LEAST_GAIN, Price, assign_layouts
from rammer.plan.program_builder import Interface, build_program, check_capacity
from rammer.plan.stage_latency import StageTimer, make_evaluator
from rammer.plan.storage import StoragePlan, assign_storage, view_sources
from rammer.plan.waits import find_dependences
from rammer.schedule.policy import Memory, OperatorGraph, Policy, Schedule
from rammer.schedule.policy_registry import parse_policy
from rammer.tuning.kernel_store import KernelStore
from rammer.tuning.measure_process import task_timer
from rammer.tuning.tuner import Tuner

#: Default aliases: outputs do not alias inputs.
NOTHING: Final[Mapping[str, str]] = MappingProxyType({})


@dataclass
class Compiler:
    """Compiler of graphs for one backend. It reuses its tuner, so equal operators are tuned once. ``device`` is the plugin's
    name, by which third parties offer kernels for it. ``unmeasured`` is the reason if whole programs are not measured."""

    backend: Backend
    options: CompileOptions = DEFAULT
    store: KernelStore = field(default_factory=KernelStore.default)
    registry: Registry | None = None
    progress: Progress = ignore_progress
    device: str = ""
    unmeasured: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)
    float32: dict[str, None] = field(default_factory=dict)  #: Operators that float16 left in float32, with the reasons.

    def __post_init__(self) -> None:
        plugins = self.registry
        self.extra_policies: Sequence[Policy] = plugins.policies(self.device) if plugins else ()
        self.options = self.options.with_policy(self.backend.default_policy)
        self.policy = parse_policy(self.options.policy, self.extra_policies)
        self.passes = default_passes(plugins.passes(self.device) if plugins else ())
        self.rules: Sequence[FusionRule] = plugins.fusion_rules(self.device) if plugins else ()
        self.lowerings: Lowerings = {**REGISTRY, **(plugins.lowerings(self.device) if plugins else {})}
        self.custom = plugins.operators() if plugins else {}
        self.tuner = Tuner(
            self.backend,
            self.store,
            self.options.tune,
            extra=self._extra_kernels,
            extensions=plugins.extension_key() if plugins else "",
            progress=lambda operator: self.progress("kernels", operator),
            timer=task_timer(self.backend),
        )

    def _extra_kernels(self, operator: ROperator, binding: Binding) -> Sequence[ROperator]:
        return self.registry.extra_kernels(self.device, operator, binding) if self.registry is not None else ()

    def compile_model(self, model: Model, shapes: Mapping[str, tuple[int, ...]], kept: Mapping[str, str] = NOTHING) -> Compiled:
        """Bind ``shapes`` and compile. Raises BadInput if a dynamic dimension stays open. ``kept`` outputs are stored in the
        memory of inputs where possible (``frontend.ranges.kv_cache``)."""
        self.seconds, self.memory, self.float32 = {}, Memory(), {}
        with self.registry.blaming() if self.registry else nullcontext():
            with self.step("bind"):
                graph, rest = bind_until(model, shapes, self.lowerings)
            made = self.compile(graph, kept if rest is None else NOTHING)
            return replace(made, rest=rest, float32=tuple(self.float32))

    def compile_range(
        self,
        model: Model,
        shapes: Mapping[str, tuple[int, ...]],
        spans: Mapping[str, tuple[int, int]],
        derived: Mapping[str, AffineExtent] = NONE,
        kept: Mapping[str, str] | None = None,
        steps: Mapping[str, int] = NO_STEPS,
    ) -> Compiled:
        """Compile one program for all lengths in ``spans`` of open dimensions, at distances of ``steps`` from the greatest.

        ``shapes`` fixes the remaining dimensions. Raises NoRange if no single program covers the range. ``kept``, for fixed
        arrays, maps outputs to the inputs they alias; only those inputs hold zeros beyond the lengths."""
        self.seconds, self.memory, self.float32 = {}, Memory(), {}
        probed = self.probed(model, spans, steps, lambda point: shapes_at(model, shapes, point, derived))
        with self.registry.blaming() if self.registry else nullcontext(), collector_paused():
            made = probed.unified(partial(self._compile_points, kept=kept))
            assert made.ranged is not None
            made = replace(made, ranged=replace(made.ranged, spans=dict(spans), steps=dict(steps)))
            with self.step("cases"):
                made = verify_tables(with_cases(made, self.backend, self.policy), self.backend.vdevice)
            segments = [s if not isinstance(s, ProgramSegment) or s.cases else self._in_form(s) for s in made.segments]
        return replace(made, segments=tuple(segments), seconds=dict(self.seconds), float32=tuple(self.float32))

    def _compile_points(
        self, fit: LengthFit, graphs: Sequence[Graph], without: Collection[str], kept: Mapping[str, str] | None
    ) -> Compiled:
        """Compile the program of all points of ``fit``, from graphs after all passes except ``without``."""
        layers = open_layers(fit, graphs)
        if layers:
            found = open_programs(fit, layers, graphs, self._open_steps(without))
            return Compiled(found.graph, found.segments, ranged=found.ranged)
        for graph in graphs:
            check_one(graph, self.lowerings)
        with self.step("lower"):
            wanted = None if kept is None else _alias_tensors(graphs[0], kept)
            try:
                over, ranged, ended = in_common(fit, [lower(g, self.lowerings, ranged=True) for g in graphs], wanted)
            except NoRange:
                if not any(n.op == "Resize" for n in graphs[0].nodes):
                    raise
                fit = LengthFit(fit.points, fit.spans, fit.steps)  # the tables of a resize may differ between lengths
                resized = [lower(g, self.lowerings, ranged=True, any_ratio=True) for g in graphs]
                over, ranged, ended = in_common(fit, resized, wanted)
        computes, first = over.graph, graphs[0]
        lengths = tuple(Value(t, computes.types[t], computes.aliases[t]) for t in ranged.lengths.values())
        graph = replace(first, inputs=(*(replace(v, type=computes.types[v.name]) for v in first.inputs), *lengths))
        ports = ports_of(graph.inputs), ports_of(graph.outputs)
        segment = self._choose_faster(lambda compiler: compiler.program(computes, *ports, ended, over, form=False))
        return Compiled(graph, (replace(segment, program=interleave_tasks(segment.program)),), ranged=ranged)

    def probed(
        self,
        model: Model,
        spans: Mapping[str, tuple[int, int]],
        steps: Mapping[str, int],
        shapes_of: Callable[[Point], Mapping[str, tuple[int, ...]]],
    ) -> ProbedModel:
        """Return ``model`` for a range of lengths; ``shapes_of`` are its input shapes."""
        return ProbedModel(model, self.lowerings, spans, steps, shapes_of, self._run_passes_without, OF_EXTENTS, OF_EQUALS)

    def _run_passes_without(self, graph: Graph, without: Collection[str]) -> Graph:
        with self.step("passes"):
            return self.rewritten(graph, Pipeline(self.passes).without(without).passes)[0]

    def _open_steps(self, without: Collection[str]) -> DynamicSteps:
        def rewritten(graph: Graph, ranged: bool) -> Graph:
            return self._run_passes_without(graph, without if ranged else ())

        program = partial(self.program, form=False)  # parts get their forms when they are complete
        return DynamicSteps(self.lowerings, rewritten, program, self.backend.iteration_cost)

    def compile(self, graph: Graph, kept: Mapping[str, str] = NOTHING) -> Compiled:
        """Run all steps from the graph on. Raises RammerErrors that name the node, operator or pass at fault."""
        # Measuring takes long, and third parties' code may leave cycles; objects of the compilation alone all stay alive.
        with nullcontext() if MEASURED[self.options.tune] else collector_paused():
            return self._compile_graph(graph, kept)

    def _compile_graph(self, graph: Graph, kept: Mapping[str, str]) -> Compiled:
        with self.step("passes"):
            graph, reports = self.rewritten(graph, self.passes)
        print_debug(DECISIONS, lambda: "\n".join(f"pass {r}" for r in reports))
        segments, uses = list[Segment](), SubgraphIndex(graph)
        found = split_segments(graph, self.lowerings, self.backend.vdevice.sort_steps)
        kept = _alias_tensors(graph, kept) if len(found) == 1 else NOTHING
        for number, (nodes, why) in enumerate(found):
            if why:
                segments.append(self.host_segment(graph, nodes[0], why))
            else:
                segments.append(self._compile_segment(uses.subgraph(nodes, number), kept))
        return Compiled(graph, tuple(segments), tuple(reports), dict(self.seconds))

    def rewritten(self, graph: Graph, passes: tuple[AnyPass, ...]) -> tuple[Graph, list[PassReport]]:
        """Return ``graph`` after all ``passes``; float16 comes after constant folding, which is better done in float32."""
        graph, reports = Pipeline(passes).run(graph)
        if self.options.precision == "float16":
            graph, more = narrow_graph(graph, passes, self.lowerings, self.options.keep_float32)
            self.float32 |= dict.fromkeys(line for r in more for line in r.details)
            reports += more
        return graph, reports

    def host_segment(self, graph: Graph, node: Node, why: str) -> Segment:
        """Return the segment of an operator without a tensor expression. ``why`` is the reason."""
        steps = LoopSteps(
            self.lowerings, lambda g: self.rewritten(g, self.passes)[0], lambda g: self._compile_segment(g, NOTHING, form=False)
        )
        made = make_fallback_segment(graph, node, why, steps if self.backend.iteration_cost is not None else None, self.custom)
        return self._in_form(made) if isinstance(made, ProgramSegment) else made

    def _compile_segment(self, graph: Graph, kept: Mapping[str, str], form: bool = True) -> ProgramSegment:
        return self._choose_faster(lambda compiler: compiler._lower_segment(graph, kept, form))

    def _in_form(self, segment: ProgramSegment) -> ProgramSegment:
        """Return a complete program, which had no choice of policies, in the best execution form."""
        policy = parse_policy(segment.program.policy, self.extra_policies)
        with self.step("forms"):
            return self._form_chooser(Chooser(policy, self.backend, self.store)).chosen([segment])

    def _form_chooser(self, chooser: Chooser) -> FormChooser:
        return FormChooser(chooser, self.extra_policies, self.unmeasured)

    def _choose_faster(self, make: Callable[[Compiler], ProgramSegment]) -> ProgramSegment:
        """Return the program that ``make`` builds; if kernels are measured, the faster one of those with and without."""
        made = make(self)
        if not MEASURED[self.options.tune] or self.unmeasured:
            return made
        with self.step("policies"):
            try:
                plain = make(self._untuned_compiler)
            except DeviceFailure:  # the best prediction does not fit; the measured program ran
                return made
            made = tuned_or_not(made, plain, self.backend, self.store)
        print_debug(DECISIONS, lambda: f"policy {made.choice or made.program.policy}")
        return made

    @cached_property
    def _untuned_compiler(self) -> Compiler:
        """A compiler of the same options that measures no kernels."""
        return replace(self, options=replace(self.options, tune="off"), progress=ignore_progress, seconds={}, memory=Memory())

    def _lower_segment(self, graph: Graph, kept: Mapping[str, str], form: bool) -> ProgramSegment:
        with self.step("lower"):
            found = append_in_place(lower(graph, self.lowerings), kept)
        return self.program(found.graph, ports_of(graph.inputs), ports_of(graph.outputs), None, found, form)

    def program(
        self,
        compute: ComputeGraph,
        inputs: tuple[Port, ...],
        outputs: tuple[Port, ...],
        ended: RangeBounds | None = None,
        found: Appended | None = None,
        form: bool = True,
    ) -> ProgramSegment:
        """Compile tensor expressions to a verified program. Ranged programs (``ended`` given) are scheduled by predicted time,
        since no single length is representative. ``found`` lists outputs stored in place over an input. Without ``form``, the
        program is for the device's first execution form."""
        ranged, kept = ended is not None, found.kept if found is not None else NOTHING
        ends = merge_ended(ended, found.ended) if found is not None else ended
        masked, trials = ranged or bool(kept), list[BatchTrial | CutTrial]()

        def batch(graph: ComputeGraph) -> ComputeGraph:
            nonlocal ends
            with self.step("batch"):
                graph, tried = self._batch_operators(graph, not masked)
                ends = with_batches(ends, graph) if ends else None
            trials.extend(tried)
            return graph

        with self.step("passes"):
            passes = Pipeline(self.passes).without(OF_MASKS if masked else ())
            compute, reports = passes.run_computes(compute, ComputeTarget(self.backend.vdevice, batch, self._copies_rows))
        print_debug(DECISIONS, lambda: "\n".join(f"pass {r}" for r in reports))
        with self.step("storage"):
            plan = assign_storage(compute, kept, not ends)
            stay = (*(p.tensor for p in (*inputs, *outputs)), *plan.graph.constants)
            check_capacity(compute.name, plan, stay, self.backend.vdevice)
        with self.step("tile"):
            tile = self._connect_tiles(plan, masked, ends)
            plan, tile = (plan, tile) if ranged else self._order_constants(plan, tile)
            tile = replace(tile, decisions=(*trials, *tile.decisions))
            tile = replace(tile, operators=ended_operators(tile.operators, ends)) if ends else tile
        first, *others = [
            self._plan_programs(compute, p, tile, inputs, outputs, ranged) for p in self._propose_layouts(plan, tile)
        ]
        best = next(
            (o for o in others if self._segment_seconds(o[0]) < self._segment_seconds(first[0]) * (1 - LEAST_GAIN)), first
        )
        with self.step("policies"):
            unmeasured = OPEN_LENGTHS if any(o.lengths for o in best[0].program.operators) else self.unmeasured
            chooser = Chooser(self.policy, self.backend, self.store, unmeasured)
            made = self._form_chooser(chooser).chosen(best) if form else chooser.chosen(best)
            made = replace(made, passes=tuple(reports))
        print_debug(DECISIONS, lambda: f"{tile.describe(self.backend.vdevice)}\npolicy {made.choice or made.program.policy}")
        print_debug(PROGRAMS, lambda: str(made.program))
        return made

    def _batch_operators(self, compute: ComputeGraph, cut: bool) -> tuple[ComputeGraph, tuple[BatchTrial | CutTrial, ...]]:
        if self.options.batching == "off":
            return compute, ()
        steps = PartPricer(lambda g: self._plan_part(g).copies, self._standalone_seconds, bool(MEASURED[self.options.tune]))
        return batch_where_it_pays(compute, steps, self.options.batching == "all", self.options.batching == "pad", cut)

    def _standalone_seconds(self, compute: ComputeGraph) -> float:
        """Return the time of a part of a graph as a separate program, or infinity if nothing fits."""
        plan = self._plan_part(compute)
        inputs, outputs = (tuple(Port(n, n) for n in names) for names in (compute.inputs, compute.outputs))
        try:
            made, *_ = self._plan_programs(
                compute, *self._order_constants(plan, self._connect_tiles(plan)), inputs, outputs, ranged=False
            )
        except DeviceFailure:
            return math.inf
        # A schedule counts tasks. Concurrent tasks that occupy more vEUs than the device has are serialised.
        return max(
            self._segment_seconds(made), 0.0 if MEASURED[self.options.tune] else made.busy_time() / self.backend.vdevice.veus
        )

    def _plan_part(self, compute: ComputeGraph) -> StoragePlan:
        """Run the passes after batching on a part of a graph, and assign storage."""
        passes = self.passes[[p.name for p in self.passes].index(BATCH) + 1 :]
        target = ComputeTarget(self.backend.vdevice, rows=self._copies_rows)
        return assign_storage(Pipeline(passes).run_computes(compute, target)[0])

    @property
    def _copies_rows(self) -> bool:
        """True if fusion can place rows before products of few rows."""
        return self.options.fusion == "full" and any("leading rows" in f for f in self.backend.fused_forms.values())

    def _connect_tiles(self, plan: StoragePlan, unfused: bool = False, ends: RangeBounds | None = None) -> TileGraph:
        """Connect tensors on chip to operators, as far as no region is faster with element-wise fusion. Operators with masks (of
        a range, or over inputs) are not stitched."""
        sources, binding, device = view_sources(plan.graph, plan.storages), self._make_binding(plan), self.backend.vdevice
        prices = GroupPrices(device, binding, self.cost_model(binding, ends))
        tile = connect(plan.graph, device, sources, prices, self.options.fusion)
        if unfused or self.options.fusion != "full":
            return tile
        latency = self.latency(binding)
        tile = stitch(tile, device, latency, prices)
        for fusion in ("elementwise", "none"):
            tile = fall_back(tile, connect(plan.graph, device, sources, prices, fusion), prices, latency)
        for rule in self.rules:
            tile = apply_rule(rule, tile, device, prices, latency)
        return tile

    def latency(self, binding: Binding) -> Evaluator:
        """Return the device's evaluator for stitching."""
        return make_evaluator(self.tuner, binding)

    def _order_constants(self, plan: StoragePlan, tile: TileGraph) -> tuple[StoragePlan, TileGraph]:
        """Arrange constants of products of few rows in the best order for the operators. Mostly that is the model's order:
        kernels of other orders are searched when they are chosen."""
        own = self._make_binding(plan, tile.operators)

        def seconds(operator: ROperator, binding: Binding) -> float:
            return self._make_price(own)(operator, own.storages) if binding is own else self.tuner.first(operator, binding)

        return order_constants(plan, tile, own, seconds)

    def _plan_programs(
        self,
        compute: ComputeGraph,
        plan: StoragePlan,
        tile: TileGraph,
        inputs: tuple[Port, ...],
        outputs: tuple[Port, ...],
        ranged: bool,
    ) -> list[ProgramSegment]:
        """Compile operators and their storages to verified programs, one for each proposal of the policy. The best prediction
        comes first."""
        binding, device = self._make_binding(plan, tile.operators), self.backend.vdevice
        with self.step("kernels"):
            self.tuner.prepare(tile.operators, binding)
            kernels = {o.name: self.tuner.kernels(o, binding) for o in tile.operators}
        with self.step("schedule"), attribute_errors(self.policy):
            after = find_dependences(tile.operators, plan.storages)
            timed = StageTimer(self.backend, self.store, binding) if MEASURED[self.options.tune] and not ranged else None
            asked = OperatorGraph(kernels, after, binding.constants, timed, self.memory)
            schedules = self.policy.proposals(asked, device)
        ports, precision = Interface(compute.name, inputs, outputs, plan.graph.constants), self.options.precision

        def build(policy: Policy, schedule: Schedule) -> RProgram:
            return build_program(ports, schedule, plan, policy=str(policy), vdevice=device, precision=precision)

        with self.step("plan"), attribute_errors(self.policy):  # an illegal schedule is detected here
            programs = build_legal_programs(schedules, build, 1 if ranged else None)
        constants = plan.graph.constants
        values = [{n: v for n, v in constants.items() if n in p.storage} for p in programs]
        return [ProgramSegment(p, v, compute, tile, kernels) for p, v in zip(programs, values, strict=True)]

    def _make_binding(self, plan: StoragePlan, operators: Sequence[ROperator] = ()) -> Binding:
        """Return the facts about tensors that kernels may use; constants with several readers need ``operators``."""
        constants = frozenset(plan.graph.constants)
        return Binding(plan.graph.types, plan.storages, constants, reused_constants(operators, constants), self.options.precision)

    def _propose_layouts(self, plan: StoragePlan, tile: TileGraph) -> list[StoragePlan]:
        """Return the storage plans to choose from. They are the model's layout, and the one with images of narrow types moved, if
        any; with ``nhwc`` one plan; with ``auto`` the model's layout and the cheapest operator by operator."""
        with self.step("layouts"):
            if self.options.layout == "keep":
                moved = assign_layouts(plan, tile.operators, narrow=True)
                return [plan, moved] if moved.storages != plan.storages else [plan]
            if self.options.layout == "nhwc":
                return [assign_layouts(plan, tile.operators)]
            cheapest = assign_layouts(plan, tile.operators, self._make_price(self._make_binding(plan, tile.operators)))
            return [plan, cheapest] if cheapest.storages != plan.storages else [plan]

    def _segment_seconds(self, segment: ProgramSegment) -> float:
        """Return the time of a whole program, measured if kernels are. Operators measured one by one do not determine it."""
        if not MEASURED[self.options.tune]:
            return segment.program.predicted
        with self.step("layouts"):
            return self.backend.profiler.program_time(segment.program, segment.constants)

    def cost_model(self, binding: Binding, ends: RangeBounds | None = None) -> CostModel:
        """Return the device's cost model, with the masks of a range."""
        ended = static_operator if ends is None else lambda o: ended_operators((o,), ends)[0]
        guesses = self.tuner.guessing if MEASURED[self.options.tune] else self.tuner

        def kernel(operator: ROperator) -> RKernel | None:
            return guesses.first_kernel(operator, binding)

        forms = self.backend.fused_forms
        bare = {n for n in self.backend.families or forms if "trailing maps" not in forms.get(n, ())}
        had = frozenset[FusedForm]().union(*forms.values())
        return CostModel(kernel, lambda o: self.backend.rate(o, binding), binding, ended, forms=had, bare=frozenset(bare))

    def _make_price(self, binding: Binding) -> Price:
        """Return a function for the seconds of an operator's best kernel with other storages."""

        def price(operator: ROperator, storages: Mapping[str, Storage]) -> float:
            try:
                kernels = self.tuner.kernels(operator, replace(binding, storages=storages))
            except DeviceFailure:  # nothing fits; if so in every layout, step "kernels" reports it
                return math.inf
            return kernels[0].operator_time(self.backend.vdevice.veus)

        return price

    def resources(self, compiled: Compiled) -> list[RKernel]:
        """Return the chosen kernel of every operator with the resources that the device's compiler reports."""
        result = []
        for segment in compiled.segments:
            if isinstance(segment, ProgramSegment):
                binding = Binding.of(segment.program, segment.constants)
                for operator in segment.program.operators:
                    kernel = self.backend.kernel(operator, binding)
                    self.progress("resources", operator.name)
                    result.append(replace(kernel, compiled=self.backend.profiler.resources(kernel, binding)))
        return result

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time one step of the compilation (seconds), and report its begin."""
        self.progress(name, "")
        start = time.perf_counter()
        yield
        spent = time.perf_counter() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + spent
        print_debug(STEPS, lambda: f"{name} {spent * 1e3:.1f} ms")


def _alias_tensors(graph: Graph, kept: Mapping[str, str]) -> dict[str, str]:
    """Map ``kept`` outputs to their inputs, as tensors of ``graph``."""
    names = {v.external or v.name: v.name for v in graph.inputs}
    return {v.name: names[kept[v.external or v.name]] for v in graph.outputs if v.external in kept or v.name in kept}
