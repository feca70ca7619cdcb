"""The figures that matter: of which claim each is, what was aimed at, and what the paper reports."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Headline:
    """One figure of a benchmark. `aim` is a bound; with `paper`, it is what the paper reports of its own machines."""

    claim: str
    figure: str
    says: str
    aim: float | None = None
    at_most: bool = False
    paper: float | None = None

    def cells(self, value: float | None) -> tuple[str, str, str, str]:
        """
        >>> Headline("sim", "requests_per_s", "requests simulated in a second", aim=100_000).cells(152_360.0)
        ('requests simulated in a second', '152,400', '≥ 100,000', '')
        >>> Headline("serve", "lone_extra_ms", "a lone request (ms)", aim=5, at_most=True).cells(5.7)
        ('a lone request (ms)', '**5.7**', '≤ 5', '')
        """
        return self.says, self._value(value), self._aim(), "" if self.paper is None else _short(self.paper)

    def _value(self, value: float | None) -> str:
        if value is None:
            return "not measured"
        return _short(value) if self.met(value) else f"**{_short(value)}**"

    def _aim(self) -> str:
        return "" if self.aim is None else f"{'≤' if self.at_most else '≥'} {_short(self.aim)}"

    def met(self, value: float) -> bool:
        return self.aim is None or self._reaches(value, self.aim)

    def cells_of_paper(self, value: float | None) -> tuple[str, str, str]:
        """What the paper reports and what was found; bold where that is less good.

        >>> Headline("tcb", "slots", "slots, of 10 rows", paper=1.18).cells_of_paper(1.018)
        ('slots, of 10 rows', '1.18', '**1.018**')
        """
        assert self.paper is not None
        found = "not measured" if value is None else _short(value)
        short_of_it = value is not None and not self._reaches(value, self.paper)
        return self.says, _short(self.paper), f"**{found}**" if short_of_it else found

    def missed(self, value: float) -> str:
        """
        >>> Headline("serve", "lone_extra_ms", "a lone request (ms)", aim=5, at_most=True).missed(5.7)
        'a lone request (ms): 5.7, aim ≤ 5'
        """
        return f"{self.says}: {_short(value)}, aim {self._aim()}"

    def _reaches(self, value: float, bound: float) -> bool:
        return value <= bound if self.at_most else value >= bound


HEADLINES = {
    "E3's figures, simulated on published curves of ONNX Runtime: the best batch or setting of each": tuple(
        Headline("e3", f"fig{number}_onnx_over_{over}", f"figure {int(number)}, {what}", paper=paper)
        for number, over, what, paper in (
            ("07", "early_exit", "BERT-base on 16 V100: over early exit", 1.44),
            ("07", "no_exits", "the same, over no exits", 1.30),
            ("08", "early_exit", "ResNet-50: over BranchyNet", 1.74),
            ("08", "no_exits", "the same, over ResNet-50", 1.58),
            ("09", "no_exits", "DistilBERT: over no exits", 1.67),
            ("13", "early_exit", "6 V100, 8 P100, 15 K80: over early exit", 1.70),
            ("18", "early_exit", "PABEE: over early exit", 1.55),
            ("19", "early_exit", "bursts: over early exit", 1.29),
            ("19", "no_exits", "the same, over no exits", 1.16),
            ("23", "early_exit", "the more error is allowed: over DeeBERT", 1.43),
            ("24", "early_exit", "by SLO: over early exit", 1.63),
            ("24", "no_exits", "the same, over no exits", 1.34),
            ("25", "all_ramps_open", "control over ramps: over all ramps open", 1.16),
        )
    ),
    "Planning": (
        Headline("planner", "ms_bert_base_46gpus", "plan of BERT-base, 46 GPUs of one kind (ms)", 50, True),
        Headline("planner", "ms_bert_base_46gpus_4kinds", "plan of BERT-base, 46 GPUs of four kinds (ms)", 300, True),
        Headline("planner", "s_96blocks_1000gpus", "plan of 96 blocks, 1,000 GPUs of eight kinds (s)", 5, True),
        Headline("planner", "gap_1000gpus", "gap of that plan to the best one, at most", 0.01, True),
        Headline("planner", "bruteforce_mismatches", "plans that differ from brute force's", 0, True),
        Headline("planner", "short_of_best_mean", "short of the best pipelines on any devices, mean"),
        Headline("planner", "short_of_best_kinds_apart_mean", "the same, where no two pipelines share a kind"),
        Headline("bound", "problems", "problems by which plans were judged, of 120", 120),
        Headline("bound", "promise_error_p90", "abs(sustained / promised - 1), p90", 0.03, True),
        Headline("bound", "promise_error_max", "the same, worst case", 0.08, True),
        Headline("bound", "beaten_by_baseline", "problems where a baseline sustains 2 % more", 0, True),
        Headline("bound", "best_neighbour_p90", "what the best plan close by sustains more, p90", 0.02, True),
        Headline("bound", "hindsight_gain_1x", "what the best admission in hindsight gains at the promise", 0.02, True),
        Headline("bound", "hindsight_gain_1_2x", "the same at 1.2 times the promise", 0.03, True),
        Headline("bound", "hindsight_gain_2x", "the same at 2 times the promise", 0.05, True),
        Headline("bound", "late_admitted_1x", "share of admitted inputs that are late at the promise", 0.01, True),
        Headline("bound", "share_of_oracle_homogeneous", "sustained / upper bound, one kind of device", 0.93),
        Headline("bound", "share_of_oracle_mixed", "sustained / upper bound, three kinds", 0.93),
        Headline("forecast", "mae_forecast", "mean error of the survival forecast"),
        Headline("forecast", "mae_last", "mean error of the last window taken as forecast"),
    ),
    "Devices that nobody measured here": (
        Headline("curves", "held_out_error_median", "error of curves derived from others, median", 0.15, True),
        Headline("curves", "held_out_error_p95", "error of derived curves, 95th percentile"),
        Headline(
            "curves",
            "other_networks_error_median",
            "error of derived curves, networks that were not seen, median",
            0.15,
            True,
        ),
        Headline(
            "curves",
            "other_devices_error_median",
            "error of derived curves, devices that were not seen, median",
            0.15,
            True,
        ),
        Headline(
            "curves", "unseen_devices_inside_interval", "times of such devices inside their intervals, share", 0.8
        ),
        *(
            Headline(
                "curves",
                f"gain_bert_{kind}_{backend}_over_{over}",
                f"BERT-base, 16 {kind.upper()}, {name}, planned: over {over.replace('_', ' ')}",
            )
            for kind in ("a100", "l4", "t4")
            for backend, name in (("onnx", "ONNX Runtime"), ("torch", "eager PyTorch"))
            for over in ("early_exit", "no_exits")
        ),
    ),
    "Serving, on virtual devices": (
        Headline("serve", "rps_ours", "requests/s through HTTP, two splits"),
        Headline("serve", "lone_extra_ms", "a lone request, over its devices' time (ms)", 5, True),
        Headline("serve", "p50_extra_ms_at_30_percent_one_split", "p50 at 30 % load, over one pass (ms)", 3, True),
        Headline("serve", "p50_extra_ms_at_30_percent", "p50 at 30 % load, over two passes (ms)", 3, True),
        Headline("serve", "goodput_share_1split", "goodput over what the plan promised, 1 split", 0.9),
        Headline("serve", "goodput_share_2splits", "the same, 2 splits", 0.9),
        Headline("serve", "goodput_share_3splits", "the same, 3 splits on two kinds", 0.9),
        Headline("serve", "ratio_naive", "BERT-base, one V100, batch 16: goodput over early exit as it is", paper=1.44),
        Headline("serve", "ratio_stock", "the same, over the network without exits", paper=1.30),
        Headline("serve", "ratio_naive_batch_4", "the same at batch 4: goodput over early exit as it is", paper=1.44),
        Headline("serve", "ratio_stock_batch_4", "the same, over the network without exits", paper=1.30),
        Headline("serve", "ratio_naive_flat", "devices of flat batch time: goodput over early exit as it is"),
        Headline("serve", "ratio_stock_flat", "the same, over the network without exits"),
        Headline("serve", "overload_share", "goodput at three times the load, over its peak", 0.9),
        Headline("serve", "refusal_p50_ms", "a refusal, p50 (ms)", 20, True),
        Headline("serve", "hop_256kib_ms", "256 KiB of survivors to the next split, p50 (ms)", 2.5, True),
        Headline("serve", "hop_3mib_ms", "3 MiB of survivors to the next split, p50 (ms)", 8, True),
    ),
    "Compared with other servers, real compute": (
        *(
            Headline("peers", f"goodput_over_{peer}_{workload}", f"{says}: goodput in 200 ms over {name}'s")
            for workload, says in (("demo", "the demo"), ("minilm", "a text classifier of MiniLM's size"))
            for peer, name in (("ray", "plain Ray Serve"), ("litserve", "LitServe"), ("bentoml", "BentoML"))
        ),
        Headline("peers", "lone_request_over_leanest", "a lone request over the leanest peer's, worst case", 1.2, True),
    ),
    "Overload, the demo with real compute": (
        *(
            Headline(
                "overload",
                f"goodput_share_{flood}_{inputs}_{protocol}",
                f"{name}, {inputs} a request: goodput at {times} times the load, over its best",
                0.95,
            )
            for protocol, name in (("http", "HTTP"), ("grpc", "gRPC"))
            for inputs in (1, 64)
            for flood, times in (("1_5x", "1.5"), ("3x", "3"), ("10x", "10"))
        ),
        Headline("overload", "refusal_p99_ms", "a refusal, p99 (ms)", 50, True),
        Headline(
            "overload",
            "refusal_p99_ms_by_server",
            "a refusal, p99 (ms), without what the generator read late",
            50,
            True,
        ),
        Headline("overload", "late", "answers that the generator read after their deadline", 0, True),
        Headline("overload", "late_by_server", "answers that the server surely gave too late", 0, True),
        Headline("overload", "back_after_s", "from the end of a flood to all in time (s)", 2, True),
    ),
    "The simulator": (
        Headline("sim", "requests_per_s", "requests simulated in a second, one core", 100_000),
        Headline("sim", "goodput_error_max", "simulated against live goodput, relative error, worst case", 0.05, True),
        Headline("sim", "p50_error_max", "simulated against live p50, relative error, worst case", 0.1, True),
        Headline("sim", "p99_error_max", "simulated against live p99, relative error, worst case", 0.1, True),
        Headline("sim", "ratio_naive_homogeneous", "datasheets: 16 V100, batch 8, over early exit", paper=1.44),
        Headline("sim", "ratio_stock_homogeneous", "the same, over no exits", paper=1.30),
        Headline(
            "sim", "ratio_best_heterogeneous", "datasheets: 6 V100, 8 P100, 15 K80, batch 8, over the best", paper=1.70
        ),
    ),
    "Re-planning, live on virtual devices": (
        Headline("replan", "changes", "plan changes under load", 30),
        Headline("replan", "failed", "requests that failed during them", 0, True),
        Headline("replan", "wrong", "wrong answers during them", 0, True),
        Headline(
            "replan",
            "min_goodput_share",
            "goodput of the worst second around a plan change, over the steady state",
            0.8,
        ),
        Headline("replan", "adapt_share_after_2_windows", "two windows after a switch, over the best plan", 0.95),
        Headline("chaos", "faults", "faults under load", 40),
        Headline("chaos", "lost", "admitted requests without an answer in these faults", 0, True),
        Headline("chaos", "worst_recovery_s", "longest way back to 90 % of the reachable goodput (s)"),
    ),
    "What plans keep, with real compute (BERT-base's shape in bfloat16, SLO 1 s, unless a row says otherwise)": (
        Headline("real", "live_per_s_constant_bfloat16", "the chosen plan, live over HTTP (inputs/s)"),
        Headline("real", "live_over_promise_constant_bfloat16", "real compute: the plan, live over promise", 0.95),
        Headline("real", "live_over_promise_early_exit_bfloat16", "early exit in one split over its promise", 0.95),
        Headline("real", "live_over_promise_no_exits_bfloat16", "no exits over its promise", 0.95),
        Headline("real", "chosen_over_best_simple_bfloat16", "real compute, live: over early exit alone", 0.98),
        Headline("real", "constant_over_no_exits_bfloat16", "the same over no exits"),
        Headline("real", "constant_over_ray_bfloat16", "the same over Ray Serve with the same exits inside a call"),
        Headline("real", "constant_over_litserve_bfloat16", "the same over LitServe with the same exits inside a call"),
        Headline("real", "live_over_promise_constant_float32", "the chosen plan over its promise, float32", 0.95),
        Headline("real", "live_over_promise_constant_int8", "the same in int8", 0.95),
        Headline("real", "live_over_promise_constant_slo500_bfloat16", "the same, SLO 500 ms", 0.95),
        Headline("real", "live_over_promise_constant_slo200_bfloat16", "the same, SLO 200 ms", 0.95),
        Headline(
            "real", "live_over_promise_constant_twice_bfloat16", "the same, two replicas on the generator's cores", 0.95
        ),
        Headline("real", "new_shape_over_known_bfloat16", "launches of token counts that are new", 1.02, True),
        Headline("real", "launch_beside_layers_ms_bfloat16", "a launch beside its layers (ms)", 0.3, True),
        Headline("real", "stop_beside_layers_ms_bfloat16", "a stop beside its layers (ms)", 0.1, True),
        Headline("real", "wall_over_processor_bfloat16", "a launch's time over its processor time", 1.02, True),
        Headline("real", "fill_bfloat16", "fill of all splits but the last at 90 % of the promise", 0.95),
        Headline("real", "replica_idle_share_bfloat16", "idle replica at 90 % of the promise", 0.05, True),
        Headline("real", "virtual_2ms_idle_share_at_90_percent", "the same, virtual launches of 2 ms", 0.05, True),
        Headline("real", "virtual_2ms_idle_share_in_overload", "the same, at 1.3 times the promise", 0.05, True),
    ),
    "Several applications on one fleet": (
        Headline(
            "fleet", "shared_over_divided", "answers in time: arbiter over devices divided once, mean of loads", 1.3
        ),
        Headline("fleet", "fluid_over_divided", "the same by arithmetic, if devices moved at once"),
        Headline("fleet", "shared_over_divided_50", "arbiter over devices divided once, a mean load of 50 %"),
        Headline("fleet", "worst_application_50", "the same for the application that gains least, 50 %"),
        Headline("fleet", "shared_over_divided_100", "the same for all, 100 %"),
        Headline(
            "fleet",
            "flooded_neighbour_kept",
            "one gets 10 times its inputs: what another keeps of its own, worst",
            0.98,
        ),
        Headline("fleet", "brute_force_mismatches", "decisions of the arbiter that are not the best of all", 0, True),
        Headline("fleet", "s_goodput_10_on_46", "10 applications on 46 GPUs of four kinds (s)", 5, True),
        Headline("fleet", "s_goodput_50_on_1000", "50 applications on 1,000 GPUs of four kinds (s)", 60, True),
        Headline("fleet", "gap_goodput_50_on_1000", "gap of that division to the best one, at most"),
        Headline("fleet", "gap_fairness_50_on_1000", "the same for the goal fairness"),
        Headline("fleet", "divisions_mismatches", "divisions that are not the best of all", 0, True),
        Headline("fleet", "s_per_division_50", "a decision of the arbiter, 24 devices of three kinds (s)"),
        Headline("fleet", "move_s", "live: from a decision until the other application uses the device (s)", 5, True),
    ),
    "The controller against plans that stay": (
        Headline("regret", "regret_mean", "real arrivals, simulated: goodput lost against the best", 0.01, True),
        Headline("regret", "regret_worst_hour", "the same, in the worst hour", 0.03, True),
        Headline("regret", "harm_share", "windows in which a change cost over 2 %", 0, True),
        Headline("regret", "burst_10x_in_time", "live: 10 times the calm rate, over what the devices can", 0.97),
        Headline("regret", "burst_30x_in_time", "live: 30 times the calm rate, over what the devices can", 0.95),
        Headline("regret", "seconds_to_react", "live: from the first refusal to a larger plan (s)", 2, True),
        Headline("regret", "x_full_mix_survival_error", "live: survival believed with 30 % X-Full, off by", 0.02, True),
    ),
    "Several nodes, on one machine": (
        Headline("cluster", "node_faults", "faults of nodes under load", 100),
        Headline("cluster", "lost", "requests lost in faults of nodes", 0, True),
        Headline("cluster", "wrong", "answers that were wrong in them", 0, True),
        Headline("cluster", "partition_recovery_s", "a silent partition: goodput below 90 % (s)", 6, True),
        Headline("cluster", "fill_2_fronts_over_one", "two fronts: how full batches are, over one front's", 0.95),
        Headline("cluster", "p99_2_fronts_over_one", "two fronts: p99 at half load, over one front's", 1.05, True),
        *(
            Headline("cluster", f"fronts_{fronts}_{figure}", f"fronts on shared cores, {fronts}: {says}")
            for fronts in (1, 2, 4)
            for figure, says in {"rps": "requests/s", "cpu_ms": "processor time of fronts for a request (ms)"}.items()
        ),
        Headline("cluster", "goodput_share_4nodes", "cluster/local.yaml: goodput over what its plan promises", 0.95),
        Headline("cluster", "at_once_recovery_s_4nodes", "the same, all asked for at once: until 90 % are in time (s)"),
        Headline("cluster", "slow_link_avoided", "a link declared slow is avoided (simulated)", 1),
        Headline("cluster", "scale_up_s", "from asking for a node until it serves, Ray's fake provider (s)"),
    ),
    "Promises about accuracy": (
        *(
            headline
            for name, says in (("sst2", "SST-2"), ("agnews", "AG News"), ("demo", "the demo"))
            for headline in (
                Headline("promise", f"exceeded_share_{name}", f"{says}: promises of 1 % that were broken", 0.05, True),
                Headline("promise", f"before_exceeded_share_{name}", "the same, judged on the rows of the search"),
                Headline("promise", f"depth_{name}", "blocks run per input"),
                Headline("promise", f"before_depth_{name}", "the same, judged on the rows of the search"),
            )
        ),
        Headline("promise", "plan_thresholds_gain", "goodput with thresholds for the plan over prepare's", 1.05),
        *(
            Headline(
                "promise", f"survivors_off_{name}", f"{says}: error of the survivors that were planned for", 0.05, True
            )
            for name, says in (("sst2", "SST-2"), ("agnews", "AG News"), ("demo", "the demo"))
        ),
        Headline("promise", "audit_goodput_ratio", "goodput with audits over that without", 0.98),
        Headline("promise", "audit_p99_ratio", "p99 with audits over that without, at 70 % load", 1.02, True),
        Headline("promise", "drift_tightened_s", "from inputs that drift to thresholds that keep 99 % (s)", 30, True),
        Headline("promise", "windows_kept_share", "windows of a drifting day with 99 % agreement", 0.95),
        Headline("promise", "windows_kept_share_fixed", "the same with fixed thresholds"),
        Headline("promise", "windows_kept_share_apparate", "the same with Apparate's tuner, by 16 answers"),
        Headline(
            "promise", "windows_kept_share_live", "the demo live, ever noisier: minutes with 99 % agreement", 0.95
        ),
        Headline("promise", "windows_kept_share_live_fixed", "the same with fixed thresholds"),
        *(
            headline
            for name, says in (("sst2", "SST-2"), ("agnews", "AG News"), ("demo", "the demo"))
            for headline in (
                Headline(
                    "promise",
                    f"tail_p99_ratio_at_{load}_{name}",
                    f"--no-later, {says}, {100 * load:.0f} % load: p99 over no exits",
                    1.02,
                    True,
                )
                for load in (0.9, 0.7, 0.5, 0.3)
            )
        ),
        *(
            headline
            for name, says in (("sst2", "SST-2"), ("agnews", "AG News"))
            for headline in (
                Headline("promise", f"early_p50_ratio_{name}", f"early answers, {says}: p50 over no exits", 0.9, True),
                Headline("promise", f"early_p99_ratio_{name}", "the same: p99", 1.02, True),
                Headline("promise", f"early_agreement_{name}", "the same: answers that are the full network's", 0.99),
                Headline("promise", f"early_agreement_apparate_{name}", "the same with Apparate's tuner"),
            )
        ),
        Headline(
            "dense", "latency", "maps with bridges: mean latency over no exits, batches of 2, 4 and 8", 0.76, True, 0.76
        ),
        Headline("dense", "goodput_over_no_exits", "the same: goodput over no exits", 1.3),
        Headline("dense", "goodput_over_early_exit", "the same: goodput over batches that shrink"),
        Headline("dense", "iou_lost_8", "the same: mean IoU lost, of a promise of 1 %", 0.01, True),
        Headline("dense", "picture_iou_full", "the same: mean IoU in full"),
        Headline("dense", "promise_broken", "the same: promises of mean IoU broken, of 100 repeats", 0.05, True),
        Headline("dense", "promise_broken_agreement", "the same: promises of agreement", 0.05, True),
        *(
            Headline(
                "dense",
                f"p99_ratio_at_{load}",
                f"the same: --no-later, {100 * load:.0f} % load: p99 over no exits",
                1.02,
                True,
            )
            for load in (0.3, 0.5, 0.7, 0.9)
        ),
        Headline("rerank", "documents_per_s_over_full", "QNLI lists: documents a second over no exits", 1.5),
        Headline("rerank", "ndcg_lost", "the same: NDCG@10 lost, of a promise of 1 %", 0.01, True),
        Headline("rerank", "promises_broken_share", "the same: promises of 1 % that were broken", 0.05, True),
    ),
    "Watched": (
        Headline("watching", "page_rps_ratio", "requests/s with the page open, over nobody watching", 0.98),
        Headline("watching", "metrics_rps_ratio", "the same, scraped every 15 s", 0.98),
        Headline("watching", "tracing_rps_ratio", "the same, one request in 100 traced", 0.98),
        Headline("watching", "page_work_ratio", "processor time of a request unwatched, over that with the page open"),
        Headline("watching", "metrics_work_ratio", "the same, scraped every 15 s"),
        Headline("watching", "tracing_work_ratio", "the same, one request in 100 traced"),
    ),
    "Under attack, and for long": (
        Headline("fuzz", "cases", "wrong requests and files", 100_000),
        Headline("fuzz", "minutes", "minutes that they took", 10, True),
        Headline("fuzz", "honest_wrong", "wrong answers to a well-behaved client during them", 0, True),
        Headline("soak", "minutes", "minutes of mixed traffic, drift and faults", 60),
        Headline("soak", "requests", "requests in that time"),
        Headline("soak", "faults", "faults in that time"),
        Headline("soak", "lost", "requests that were lost", 0, True),
        Headline("soak", "wrong", "wrong answers", 0, True),
        Headline("soak", "processes", "processes that lived long enough to tell whether they grow"),
        Headline("soak", "growing", "processes whose memory grew by more than two standard errors", 0, True),
        Headline("soak", "growing_much", "processes whose memory surely grew by more than 10 MiB an hour", 0, True),
        Headline("soak", "handles_growing", "processes whose file handles grew", 0, True),
        Headline("soak", "threads_growing", "processes whose threads grew", 0, True),
    ),
    "Computing, on two cores": (
        Headline("backend", "onnx_over_torch_bert", "BERT-base, ONNX Runtime over torch", 1),
        Headline("backend", "onnx_over_torch_distilbert", "DistilBERT, the same", 1),
        Headline("backend", "onnx_over_torch_vit", "ViT-base, the same", 1),
        Headline("backend", "onnx_over_torch_resnet", "ResNet-50, the same", 1),
        Headline("backend", "demo_constant_over_naive", "the demo, constant batch over early exit"),
        Headline("backend", "demo_constant_over_stock", "the demo, constant batch over no exits"),
        Headline("backend", "minilm_constant_over_naive", "MiniLM on SST-2, constant batch over early exit"),
        Headline("backend", "minilm_constant_over_stock", "MiniLM on SST-2, constant batch over no exits"),
        Headline("backend", "minilm_int8_constant_over_stock", "the same in 8 bits, over no exits in 8 bits"),
        Headline("backend", "minilm_int8_exits_cost_points", "accuracy that exits cost there (points)", 1, True),
        Headline("packing", "packed_over_padded_mixed_16", "texts of three sets, batch 16: packed over padded", 1.6),
        Headline("packing", "packed_over_padded_mixed_16_onnx", "the same, ONNX Runtime", 1.6),
        Headline("packing", "packed_over_padded_mixed_16_int8", "the same in 8 bits", 1.6),
        Headline("packing", "packed_over_padded_sst2_8", "SST-2, batch 8: packed over padded", 1.35),
        Headline("packing", "packed_over_padded_sst2_8_onnx", "the same, ONNX Runtime", 1.35),
        Headline("packing", "packed_over_padded_sst2_8_int8", "the same in 8 bits", 1.35),
        Headline(
            "packing", "packed_over_sorted_equal_p99", "packed over sorted by length, at equal p99", 1.2, paper=1.48
        ),
        Headline("packing", "packed_over_sorted_later", "the same at a p99 four times as long", paper=1.48),
        Headline("packing", "packed_over_sorted_equal_p99_onnx", "packed over sorted at equal p99, ONNX Runtime", 1.2),
        Headline("packing", "packed_over_sorted_equal_p99_int8", "the same in 8 bits", 1.2),
        Headline(
            "packing", "overhead_equal_lengths", "texts of one length: packed over padded time, less 1", 0.03, True
        ),
        Headline("packing", "overhead_equal_lengths_onnx", "the same, ONNX Runtime", 0.03, True),
        Headline("packing", "overhead_equal_lengths_int8", "the same in 8 bits", 0.03, True),
        Headline("packing", "time_prediction_error", "error of a launch's time, derived from its tokens", 0.1, True),
        Headline("packing", "time_prediction_error_onnx", "the same, ONNX Runtime", 0.1, True),
        Headline("packing", "time_prediction_error_int8", "the same in 8 bits", 0.1, True),
        Headline("tokens", "goodput_per_s_ratio", "through HTTP, launches of so many tokens over so many texts"),
        Headline("tokens", "goodput_per_s_overloaded_ratio", "the same at 1.5 times the promise"),
        Headline("tokens", "goodput_per_s_over_padded", "through HTTP, launches of so many tokens over padded texts"),
    ),
    "Decoding, 32 residents: the demo's Llama and a T5 really computed on one core, others on virtual devices": (
        Headline("decoding", "recompute_over_full", "tokens a second, exits over no exits", 1.1),
        Headline("decoding", "project_over_full", "exits, KV of skipped blocks projected, over no exits", 1.5),
        Headline("decoding", "points_lost_by_project", "points of accuracy that these lose", 1, at_most=True),
        Headline("decoding", "verified_over_full", "exits that the full network checks, over no exits", 1.1),
        Headline("decoding", "over_exits_at_once", "exits over exits that run deep at once", 1.15),
        Headline("decoding", "over_exits_batch_of_one", "exits over exits at batch 1"),
        Headline("decoding", "full_over_generate_batch", "no exits over transformers' generate_batch", 1.0),
        Headline("decoding", "exact_match_full", "sums that are right, no exits"),
        Headline("decoding", "exact_match_recompute", "sums that are right, exits"),
        Headline("decoding", "texts_changed_by_verified", "texts that verified exits change", 0, at_most=True),
        Headline("decoding", "t5_recompute_over_full", "a T5, exits over no exits", 1.1),
        Headline("decoding", "t5_project_over_full", "a T5, KV of skipped blocks projected, over no exits", 1.5),
        Headline("decoding", "t5_points_lost_by_project", "points of accuracy that these lose", 1, at_most=True),
        Headline("decoding", "t5_verified_over_full", "exits that the full network checks, over no exits", 1.1),
        Headline("decoding", "t5_over_exits_at_once", "the same, exits over exits that run deep at once", 1.15),
        Headline("decoding", "t5_points_lost_by_recompute", "points of accuracy that its exits lose", 1, at_most=True),
        Headline("decoding", "weights_bind_over_full", "virtual, where weights bind: exits over no exits", 1.35),
        Headline("decoding", "kv_binds_over_full", "virtual, where KV binds: exits over no exits", 1.9),
        Headline("decoding", "drex_over_full", "virtual, DREX's setting: exits over no exits", paper=1.12),
        Headline("decoding", "e3_t5_wmt_over_full", "virtual, E3's T5 on WMT: exits over no exits", paper=2.84),
        Headline("decoding", "e3_t5_samsum_over_full", "virtual, E3's T5 on SAMSum: exits over no exits", paper=3.8),
        Headline("decoding", "e3_llama_over_full", "virtual, E3's Llama: exits over no exits", paper=1.48),
        Headline("decoding", "streamed_over_promised", "virtual: tokens written over promised, worst of three", 0.9),
        Headline("decoding", "ttft_kept", "virtual: texts that begin in time", 0.99),
        Headline("decoding", "tpot_kept", "virtual: texts whose tokens follow in time", 0.99),
    ),
    "Decoding, a Llama of 85 M weights in bfloat16 on one core, over HTTP": (
        Headline("decoding", "live_over_promise_off_bfloat16_1", "no exits, live over promise", 0.95),
        Headline("decoding", "live_over_promise_recompute_bfloat16_1", "exits, live over promise", 0.95),
        Headline("decoding", "live_over_promise_verified_bfloat16_1", "verified exits, live over promise", 0.95),
        Headline("decoding", "live_over_promise_project_bfloat16_1", "projected KV, live over promise", 0.95),
        Headline("decoding", "in_time_at_twice_bfloat16_1", "twice the promise: admitted texts in time", 0.99),
        Headline("decoding", "goodput_at_twice_bfloat16_1", "the same: goodput over the best", 0.95),
        Headline("decoding", "off_over_generate_bfloat16_1", "32 at once, no exits over `generate`", 0.9),
        Headline("decoding", "recompute_over_off_bfloat16_1", "32 at once, exits over no exits", 1.3),
        Headline("decoding", "verified_over_off_bfloat16_1", "32 at once, verified exits over no exits", 1.15),
        Headline("decoding", "project_over_off_bfloat16_1", "32 at once, projected KV over no exits"),
        Headline("decoding", "prefix_over_none_bfloat16_1", "500 shared tokens: texts/s over none shared", 2),
    ),
    "Cascades": (
        Headline(
            "cascade", "tabi_mnli_latency", "Tabi's MNLI: mean latency over the large network's", 0.78, True, 0.787
        ),
        Headline("cascade", "tabi_sst2_latency", "Tabi's SST-2: the same", 0.6, True, 0.6),
        Headline("cascade", "tabi_mnli_goodput", "MNLI: queries/s over the large network's", paper=1.17),
        Headline("cascade", "tabi_sst2_goodput", "SST-2: the same", paper=1.49),
        Headline("cascade", "cascade_over_large", "2 layers of MiniLM before 6: goodput over 6 alone, worst set", 1.3),
        Headline("cascade", "cascade_lost", "accuracy that it loses, worst set", 0.01, True),
        Headline("cascade", "exits_over_large", "6 layers with exits, the same", None),
        Headline("cascade", "both_over_large", "both, the same", None),
    ),
    "TCB's systems on our dispatcher, in virtual time": (
        Headline("tcb", "rows_over_padded_to_the_longest_das", "DAS: rows over padded to the longest", paper=2.22),
        Headline("tcb", "rows_over_padded_to_100_das", "DAS: rows over padded to 100 tokens", paper=2.22),
        Headline("tcb", "rows_over_sorted_by_length_das", "DAS: rows over sorted by length", paper=1.48),
        Headline(
            "tcb", "rows_over_padded_to_the_longest_first_come", "first come: over padded to the longest", paper=3.33
        ),
        Headline("tcb", "rows_over_padded_to_100_first_come", "first come: rows over padded to 100 tokens", paper=3.33),
        Headline("tcb", "rows_over_sorted_by_length_first_come", "first come: rows over sorted by length", paper=1.52),
        Headline(
            "tcb", "rows_over_sorted_by_length_first_come_variance_100", "the same, lengths of variance 100", paper=1.72
        ),
        Headline("tcb", "slots_speedup_10_rows", "slots, of 10 rows of 400 tokens", paper=1.18),
        Headline("tcb", "slots_speedup_32_rows", "slots, of 32 rows of 400 tokens", paper=2.31),
        Headline("tcb", "utility_das_over_shortest_first", "utility: DAS over shortest first", paper=1.4),
        Headline("tcb", "isobatch_over_padded_to_the_longest_das", "isobatch over padded to the longest, DAS"),
        Headline("tcb", "isobatch_over_sorted_by_length_das", "isobatch over sorted by length, DAS"),
        Headline(
            "tcb", "das_gain_1_5x", "DAS's order in our launches, 1.5 times the load: texts in time, less 1", 0.05
        ),
        Headline("tcb", "das_gain_3x", "the same at 3 times the load", 0.05),
        Headline(
            "tcb",
            "das_least_quarter_3x",
            "DAS, 3 times the load: share that the least favoured quarter of lengths gets",
            0.5,
        ),
        Headline(
            "tcb", "das_least_quarter_2x_variance_100", "DAS, 2 times the load, variance 100: the same share", 0.5
        ),
    ),
}


# The figures by which docs/results.md says what was found, in its order: claim and figure.
FOUND = (
    ("planner", "s_96blocks_1000gpus"),
    ("bound", "promise_error_p90"),
    ("sim", "goodput_error_max"),
    ("real", "live_over_promise_constant_bfloat16"),
    ("real", "chosen_over_best_simple_bfloat16"),
    ("real", "constant_over_no_exits_bfloat16"),
    ("real", "constant_over_ray_bfloat16"),
    ("peers", "goodput_over_litserve_minilm"),
    ("packing", "packed_over_padded_mixed_16"),
    ("decoding", "live_over_promise_recompute_bfloat16_1"),
    ("decoding", "kv_binds_over_full"),
    ("promise", "exceeded_share_sst2"),
    ("replan", "changes"),
    ("replan", "min_goodput_share"),
    ("chaos", "lost"),
    ("cluster", "lost"),
    ("fuzz", "honest_wrong"),
)


def command(claim: str) -> str:
    return claim if claim in ("chaos", "fuzz", "soak") else f"bench-{claim}"


def _short(value: float) -> str:
    """
    >>> _short(152360.0), _short(0.0266453), _short(0.0)
    ('152,400', '0.02665', '0')
    """
    return f"{float(f'{value:.4g}'):,.10g}"
