"""Every metric that is computed here: what it is, where it is from, what it needs.

`python -m diffcache.eval.metrics.catalog --write docs/evaluation.md` puts the table into the
documentation, `--check` says whether it is up to date. `METRICS` is read from the table below, one
line a metric; a line that begins with `#` opens a group.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Literal, cast

from diffcache.eval.metrics.weights import WEIGHTS
from diffcache.eval.pages import keep_pages, table
from diffcache.eval.record import ROOT

Direction = Literal["up", "down", "none"]
BEGIN = "<!-- table of metrics: begin (generated, see eval/metrics/catalog.py) -->"
END = "<!-- table of metrics: end -->"
SHIPPED = ("shapes-features", "shapes-classifier")
TITLES = (
    "Metric", "Key", "Definition", "Source", "Library call", "Weights", "Offline stand-in",
    "Better",
)  # fmt: skip


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        key: Name in records.
        title: Name in tables and plots.
        definition: One sentence, with the formula.
        source: Paper or standard.
        call: Function of this package that computes it.
        weights: Names in `diffcache.eval.metrics.weights.WEIGHTS`.
        packages: Modules beyond the base install that it imports, or the shipped model it uses.
        stand_in: Key of the metric that is computed in its place without the weights, or empty.
        direction: Whether more or less is better, or neither by itself.
        unit: Empty where dimensionless.
        group: Heading in the table.
    """

    key: str
    title: str
    definition: str
    source: str
    call: str
    weights: tuple[str, ...]
    packages: tuple[str, ...]
    stand_in: str
    direction: Direction
    unit: str
    group: str

    @property
    def is_lite(self) -> bool:
        """Whether it is an offline stand-in, which has no published counterpart to compare with."""
        return "_lite" in self.key


# key | title | unit | direction | definition | source | call | weights | packages | stand-in
_TABLE = """
# Fidelity: closeness to the uncached sample of the same prompt and seed
psnr_db | PSNR | dB | up | mean over pairs of 10 log10(255² / MSE) with one MSE per image, at most 100 dB (MSE below 1e-10 of 255²); videos: mean over frames first | definition; the cap as in VBench-style comparisons | `pixels.psnr`, as torchmetrics `PeakSignalNoiseRatio(data_range=1, reduction="none", dim=(1, 2, 3))` | | |
psnr_pooled_db | Pooled PSNR | dB | up | 10 log10(255² / MSE) with one MSE over all images; poor images weigh more than in the mean | definition | `pixels.pooled_psnr`, as torchmetrics `PeakSignalNoiseRatio(data_range=1)` | | |
ssim | SSIM | | up | mean of (2 μ₁μ₂ + c₁)(2 σ₁₂ + c₂) / ((μ₁² + μ₂² + c₁)(σ₁² + σ₂² + c₂)) over windows, Gaussian, 11 by 11 pixels with standard deviation 1.5, for each channel, borders reflected | Wang et al. 2004, doi 10.1109/TIP.2003.819861 | `pixels.ssim`, as torchmetrics `StructuralSimilarityIndexMeasure(data_range=1)` | | |
ms_ssim | MS-SSIM | | up | product over 5 halved scales of the contrast-structure term, and SSIM at the last, to the powers .0448, .2856, .3001, .2363, .1333; fewer scales with rescaled powers where a side is below 176 pixels | Wang et al. 2003, doi 10.1109/ACSSC.2003.1292216 | `pixels.ms_ssim`, as torchmetrics `MultiScaleStructuralSimilarityIndexMeasure(data_range=1)` from 176 pixels | | |
lpips | LPIPS | | down | sum over 5 AlexNet layers of the learned weighting of squared differences between unit-normalized feature maps, averaged over positions | Zhang et al. 2018, arXiv 1801.03924 (v0.1 heads) | `lpips.LPIPS`, as torchmetrics `LearnedPerceptualImagePatchSimilarity("alex")` without torchvision | alexnet | torchmetrics | lpips_lite
lpips_lite | LPIPS-lite | | down | mean over the levels of the shipped extractor of squared differences between unit-normalized feature maps | this project, after arXiv 1801.03924 | `lite.lpips_lite` | | shapes-features |
latent_error | Latent error | | down | ‖cached - uncached‖₂ / ‖uncached‖₂ of the latents after every step, mean over samples | definition | `eval.runs` | | |
site_error | Site error | | down | ‖stand-in - computed‖₁ / ‖computed‖₁ of a site's feature in every step that would be skipped, on the first batch | definition | `eval.oracle` | | |
temporal_error | Temporal error | | down | mean absolute difference of frame-to-frame changes, mean abs((a[t+1] - a[t]) - (b[t+1] - b[t])) / 255 | definition | `pixels.temporal_error` | | |
# Quality of images
fid | FID | | down | ‖μ₁ - μ₂‖² + tr(Σ₁ + Σ₂ - 2 (Σ₁Σ₂)^½) of 2048-d Inception pool features, covariance over N - 1, float64 | Heusel et al. 2017, arXiv 1706.08500 | `inception.load` (torch-fidelity `FeatureExtractorInceptionV3`) and `frechet.frechet`; clean-fid resize with `mode="clean"` (arXiv 2104.11222) | inception | torch_fidelity, torchvision | fid_lite
fid_lite | FID-lite | | down | the same distance on 64-d features of the shipped extractor | this project, after arXiv 1706.08500 | `lite.embed`, `frechet.frechet` | | shapes-features |
fid_to_uncached | FID to uncached | | down | FID between the cached and the uncached samples of the same prompts and seeds; 0 for identical ones | after arXiv 1706.08500 | as FID | inception | torch_fidelity, torchvision | fid_lite_to_uncached
fid_lite_to_uncached | FID-lite to uncached | | down | FID-lite between the cached and the uncached samples of the same prompts and seeds | this project | as FID-lite | | shapes-features |
kid | KID | | down | unbiased squared maximum mean discrepancy with the kernel (x·y / d + 1)³, mean over subsets | Bińkowski et al. 2018, arXiv 1801.01401 | `distances.kid`, as torchmetrics `KernelInceptionDistance` | inception | torch_fidelity, torchvision | kid_lite
kid_lite | KID-lite | | down | the same on features of the shipped extractor | this project, after arXiv 1801.01401 | `distances.kid` on `lite.embed` | | shapes-features |
is | Inception score | | up | exp(mean KL(p(y given x), p(y))) over splits, p from the logits without bias | Salimans et al. 2016, arXiv 1606.03498 | `inception.load`, `distances.inception_score`, as torchmetrics `InceptionScore` | inception | torch_fidelity, torchvision | is_lite
is_lite | IS-lite | | up | the same with the class head of the shipped extractor; at most its number of classes | this project, after arXiv 1606.03498 | `distances.inception_score` on `lite.class_probabilities` | | shapes-features |
precision | Precision | | up | share of generated features inside a ball around a real one that reaches to its 3rd neighbor | Kynkäänniemi et al. 2019, arXiv 1904.06991 | `distances.precision_recall` | inception | torch_fidelity, torchvision | precision_lite
recall | Recall | | up | share of real features inside a ball around a generated one that reaches to its 3rd neighbor | arXiv 1904.06991 | `distances.precision_recall` | inception | torch_fidelity, torchvision | recall_lite
density | Density | | up | mean number of real 5th-neighbor balls around a generated feature, over 5; can exceed 1 | Naeem et al. 2020, arXiv 2002.09797 | `distances.density_coverage` | inception | torch_fidelity, torchvision | density_lite
coverage | Coverage | | up | share of real 5th-neighbor balls with a generated feature inside | arXiv 2002.09797 | `distances.density_coverage` | inception | torch_fidelity, torchvision | coverage_lite
precision_lite | Precision-lite | | up | precision on features of the shipped extractor | this project, after arXiv 1904.06991 | `distances.precision_recall` on `lite.embed` | | shapes-features |
recall_lite | Recall-lite | | up | recall on features of the shipped extractor | this project, after arXiv 1904.06991 | `distances.precision_recall` on `lite.embed` | | shapes-features |
density_lite | Density-lite | | up | density on features of the shipped extractor | this project, after arXiv 2002.09797 | `distances.density_coverage` on `lite.embed` | | shapes-features |
coverage_lite | Coverage-lite | | up | coverage on features of the shipped extractor | this project, after arXiv 2002.09797 | `distances.density_coverage` on `lite.embed` | | shapes-features |
clip_score | CLIP score | | up | 100 max(0, cos(image features, text features)), mean over samples; prompts are cut at the text model's length (77 tokens) | Hessel et al. 2021, arXiv 2104.08718 (factor 100 as in torchmetrics) | `clip.ClipScore` (transformers `CLIPModel`) | clip | transformers | clip_score_lite
clip_score_lite | CLIP-score-lite | | up | 100 cos, not clamped, of a small image and text encoder trained on the shapes generator; prompts must be in its words | this project, after arXiv 2104.08718 | `lite.clip_score_lite` | | shapes-features |
image_reward | ImageReward | | up | learned human preference of an image for its prompt, about standard normal | Xu et al. 2023, arXiv 2304.05977 | `reward.Elsewhere` (`ImageReward.load(...).score`, in its own interpreter) | image-reward, image-reward-config | |
pick_score | PickScore | | up | exp(logit scale) cos(image features, text features) of a CLIP ViT-H/14 trained on preferences of people | Kirstain et al. 2023, arXiv 2305.01569 | `reward.PickScore` (transformers `CLIPModel`) | pickscore | transformers |
hps_v2 | HPSv2.1 | | up | cos(image features, text features) of a CLIP ViT-H/14 trained on preferences of people | Wu et al. 2023, arXiv 2306.09341 | `reward.Elsewhere` (model and transforms of `hpsv2`, in its own interpreter) | hpsv2 | |
geneval | GenEval | | up | share of pictures that show all objects, numbers, colors and positions of a prompt of GenEval | Ghosh et al. 2023, arXiv 2310.11513 | `reward.Elsewhere` (`geneval.scorer`: mmdet's Mask2Former and CLIP, in an interpreter of its own) | geneval-prompts, geneval-classes, geneval-detector, geneval-clip | |
dpg_bench | DPG-Bench | | up | share of the questions about a dense prompt that a model of visual questions answers with yes, 0 below a no; the published score is 100 times this | Hu et al. 2024, arXiv 2403.05135 | `reward.Elsewhere` (`dpg_bench.scorer`: mPLUG of modelscope, in an interpreter of its own) | dpg-questions, dpg-mplug | |
prompt_accuracy | Prompt accuracy | | up | share of the attributes a shapes prompt states that a classifier reads back from the image | this project | `pipelines.small.classifier` | | shapes-classifier |
# Quality of videos
fvd | FVD | | down | Fréchet distance of 400-d I3D logits of clips of equal length, usually 16 frames | Unterthiner et al. 2018, arXiv 1812.01717; detector and call as StyleGAN-V, arXiv 2112.14683 | `i3d.I3D`, `frechet.frechet` | i3d | | fvd_lite
fvd_lite | FVD-lite | | down | Fréchet distance of statistics over time of the shipped extractor's frame features | this project, after arXiv 1812.01717 | `lite.clip_features`, `frechet.frechet` | | shapes-features |
fvd_to_uncached | FVD to uncached | | down | FVD between the cached and the uncached videos of the same prompts and seeds | after arXiv 1812.01717 | as FVD | i3d | | fvd_lite_to_uncached
fvd_lite_to_uncached | FVD-lite to uncached | | down | FVD-lite between the cached and the uncached videos of the same prompts and seeds | this project | as FVD-lite | | shapes-features |
kvd | KVD | | down | KID's estimator on the I3D logits of clips | arXiv 1812.01717 | `i3d.I3D`, `distances.kid` | i3d | | kvd_lite
kvd_lite | KVD-lite | | down | KID's estimator on the clip features of FVD-lite | this project, after arXiv 1812.01717 | `lite.clip_features`, `distances.kid` | | shapes-features |
# Videos, by VBench's formula without its choice of videos
temporal_flickering | Temporal flickering (formula) | | up | (255 - mean abs(F[t] - F[t+1])) / 255, VBench's formula on all videos instead of static ones only | arXiv 2311.17982 | `own.temporal_flickering` | | |
# VBench, through the official package in its own interpreter (arXiv 2311.17982)
vbench_subject_consistency | VBench subject consistency | | up | mean over frames of ½(cos to the previous + cos to the first) of DINO ViT-B/16 features | arXiv 2311.17982 | `VBench.evaluate` | vbench-dino | |
vbench_background_consistency | VBench background consistency | | up | the same on CLIP ViT-B/32 features | arXiv 2311.17982 | `VBench.evaluate` | vbench-clip-b32 | |
vbench_temporal_flickering | VBench temporal flickering | | up | (255 - mean abs(F[t] - F[t+1])) / 255 on videos filtered for being static | arXiv 2311.17982 | `VBench.evaluate` | | |
vbench_motion_smoothness | VBench motion smoothness | | up | (255 - mean abs(odd frame - AMT-S interpolation from the even ones)) / 255 | arXiv 2311.17982 | `VBench.evaluate` | vbench-amt | |
vbench_dynamic_degree | VBench dynamic degree | | up | share of videos in which enough frame pairs have top 5 % RAFT flow above 6 · side / 256 pixels | arXiv 2311.17982 | `VBench.evaluate` | vbench-raft | |
vbench_aesthetic_quality | VBench aesthetic quality | | up | LAION linear head on CLIP ViT-L/14 over 10, mean over frames | arXiv 2311.17982 | `VBench.evaluate` | vbench-clip-l14, vbench-aesthetic | |
vbench_imaging_quality | VBench imaging quality | | up | MUSIQ-SPAQ over 100, mean over frames | arXiv 2311.17982 | `VBench.evaluate` | vbench-musiq | |
vbench_object_class | VBench object class | | up | share of 16 frames in which GRiT detects the object | arXiv 2311.17982 | `VBench.evaluate` | vbench-grit | |
vbench_multiple_objects | VBench multiple objects | | up | share of 16 frames in which GRiT detects both objects | arXiv 2311.17982 | `VBench.evaluate` | vbench-grit | |
vbench_human_action | VBench human action | | up | share of videos whose action is in UMT's top 5 at 0.85 or more | arXiv 2311.17982 | `VBench.evaluate` | vbench-umt | |
vbench_color | VBench color | | up | share of frames with the object whose GRiT caption names the color | arXiv 2311.17982 | `VBench.evaluate` | vbench-grit | |
vbench_spatial_relationship | VBench spatial relationship | | up | mean over frames of the agreement of GRiT boxes with the relation asked for | arXiv 2311.17982 | `VBench.evaluate` | vbench-grit | |
vbench_scene | VBench scene | | up | share of frames whose Tag2Text caption contains every word of the scene | arXiv 2311.17982 | `VBench.evaluate` | vbench-tag2text | |
vbench_appearance_style | VBench appearance style | | up | CLIP ViT-B/32 similarity of frames and style phrase, mean over frames | arXiv 2311.17982 | `VBench.evaluate` | vbench-clip-b32 | |
vbench_temporal_style | VBench temporal style | | up | ViCLIP similarity of 8 frames and prompt | arXiv 2311.17982 | `VBench.evaluate` | vbench-viclip, vbench-viclip-vocabulary | |
vbench_overall_consistency | VBench overall consistency | | up | ViCLIP similarity of 8 frames and prompt, on its own prompts | arXiv 2311.17982 | `VBench.evaluate` | vbench-viclip, vbench-viclip-vocabulary | |
# Language
exact_match | Exact match | | up | share of answers that equal the expected one after the task's normalization | task | `lm_eval.simple_evaluate` | | lm_eval |
perplexity | Perplexity | | down | exp(-mean log p of a token given those before it) | definition | `transformers` | | |
# Cost
seconds | Seconds | s | down | median wall time of timed runs after warm-up runs, synchronized, uncached and cached interleaved | definition | `eval.cost` | | |
ratio | Speed ratio | | up | uncached seconds over cached seconds of each interleaved pair, median | definition | `eval.cost` | | |
cpu_ratio | CPU ratio | | up | CPU seconds of the uncached call over those of the cached one, of each interleaved pair, median; other work on the machine hardly changes it | definition | `eval.cost` | | |
denoiser_ratio | Denoiser ratio | | up | the speed ratio within the denoiser's calls, without text encoders and decoder | definition | `eval.cost` | | |
throughput | Throughput | samples/s | up | samples of a batch over its seconds, median | definition | `eval.cost` | | |
flops | FLOPs | FLOP | down | two per multiply-accumulate of the matrix products, convolutions and attention that ran; by formula where a model is too big to run | definition | `eval.cost.flops` (`torch.utils.flop_counter` with a rule for attention on CPUs) | | |
flops_ratio | FLOPs ratio | | up | FLOPs of the uncached run over those of the row | definition | as FLOPs | | |
evaluations | Evaluations | | down | denoiser calls of a full run that cost the same FLOPs | definition | as FLOPs | | |
computed_steps | Computed steps | | down | steps of a run in which anything that the cache may skip was computed, mean over runs | definition | `diffcache.report` | | |
peak_bytes | Peak memory | bytes | down | most memory in use during a run: allocated on CUDA, resident of a fresh process on CPU | definition | `torch.cuda.max_memory_allocated`, `psutil` | | |
held_bytes | Held memory | bytes | down | bytes of the features that a cache keeps, elements times element size | definition | `diffcache.report` | | |
joules | Energy | J | down | difference of the device's energy counter over a run; its power integrated over time where it has no counter | NVML `nvmlDeviceGetTotalEnergyConsumption` | `pynvml` | | pynvml |
"""  # noqa: E501


def _read(table: str) -> dict[str, Metric]:
    metrics: dict[str, Metric] = {}
    group = ""
    for line in filter(None, table.splitlines()):
        if line.startswith("#"):
            group = line.removeprefix("#").strip()
            continue
        key, title, unit, direction, definition, source, call, weights, packages, stand_in = (
            cell.strip() for cell in line.split("|")
        )
        needed = tuple(filter(None, weights.split(", ")))
        imported = tuple(filter(None, packages.split(", ")))
        way = cast(Direction, direction)
        metrics[key] = Metric(
            key, title, definition, source, call, needed, imported, stand_in, way, unit, group
        )
    return metrics


METRICS: dict[str, Metric] = _read(_TABLE)


def markdown() -> str:
    """Return the table of all metrics as Markdown, one heading and one table a group."""
    parts: list[str] = []
    for group in dict.fromkeys(metric.group for metric in METRICS.values()):
        rows = [_row(metric) for metric in METRICS.values() if metric.group == group]
        parts += [f"### {group}", "", *table(TITLES, rows), ""]
    return "\n".join(parts)


def _row(metric: Metric) -> list[str]:
    files = [f"`{WEIGHTS[name].file}`" for name in metric.weights]
    files += [f"shipped `{name}`" for name in metric.packages if name in SHIPPED]
    title = f"{metric.title} ({metric.unit})" if metric.unit else metric.title
    instead = METRICS[metric.stand_in].title if metric.stand_in else "none"
    if not metric.weights and not metric.key.startswith("vbench_"):
        instead = "is one" if metric.is_lite else "not needed"
    better = {"up": "more ↑", "down": "less ↓", "none": "neither"}[metric.direction]
    cells = [title, f"`{metric.key}`", metric.definition, metric.source, metric.call]
    return [*cells, ", ".join(files) or "none", instead, better]


def insert(page: str) -> str:
    """Return a page with the table between its two markers.

    Raises:
        ValueError: If the page does not have the two markers once and in order.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page needs the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{markdown()}\n{END}{after}"


main = keep_pages(insert, ROOT / "docs" / "evaluation.md")

if __name__ == "__main__":
    sys.exit(main())
