"""Products that still read registers which are written again."""

from __future__ import annotations

import pytest

from engines.kernels.offline import CompileJob, KernelFacts, compile_jobs
from engines.kernels.sass import instructions, overwritten
from tests.kernels.careless import widened_product


def line(at: int, text: str) -> str:
    return f"        /*{at:04x}*/                   {text} ;                   /* 0x0000000000000000 */\n"


def loop(*body: str) -> str:
    return "".join(line(16 * at, text) for at, text in enumerate([*body, "@P0 BRA 0x0"]))


PRODUCT = "HGMMA.64x64x16.F32.BF16 R24, R{}, gdesc[UR20], R24, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x{}"


def test_what_is_written_too_early_is_found():
    load = "LDS.128 R152, [R12+UR9]"
    assert overwritten(instructions(loop(load, PRODUCT.format(152), WAIT.format(0)))) == []
    assert len(overwritten(instructions(loop(load, PRODUCT.format(152), WAIT.format(1))))) == 1
    assert len(overwritten(instructions(loop(load, PRODUCT.format(152))))) == 1
    assert overwritten(instructions(loop(WAIT.format(0), load, PRODUCT.format(152)))) == []
    assert len(overwritten(instructions(loop("@P1 " + WAIT.format(0), load, PRODUCT.format(152))))) == 1
    two = (load, PRODUCT.format(152), PRODUCT.format(156))
    assert overwritten(instructions(loop(*two, WAIT.format(1)))) == []  # the elder one is done
    assert overwritten(instructions(loop("IMAD.MOV.U32 R157, RZ, RZ, 0x43", *two, WAIT.format(1)))) == [
        "0x0 IMAD.MOV.U32 R157, RZ, RZ, 0x43 while 0x30 runs"]
    for harmless in ("STS.128 [R152], R156", "ISETP.GE.AND P3, PT, R152, UR6, PT", "UIADD3 UR9, UR8, 0x40, URZ"):
        assert overwritten(instructions(loop(harmless, PRODUCT.format(152), WAIT.format(1)))) == []
    for harmful in ("LDS.64 R151, [R12]", "CS2R R151, SRZ", "DADD R151, R2, R4", "@P2 LDS R153, [R12]",
                    "LDSM.16.M88.4 R149, [R3]", "LOP3.LUT P0, R155, R1"):
        assert overwritten(instructions(loop(harmful, PRODUCT.format(152), WAIT.format(1))))
    shared = PRODUCT.format(152).replace("R152", "gdesc[UR8]")
    assert overwritten(instructions(loop(load, shared, WAIT.format(1)))) == []


def test_groups_are_waited_for_and_not_products():
    """Two products, the second closing their group: both may be under way when one group may."""
    open_one = PRODUCT.format(152).removesuffix(", gsb0")
    loads = ("LDS.128 R152, [R12]", "LDS.128 R156, [R13]")
    assert overwritten(instructions(loop(*loads, open_one, PRODUCT.format(156), WAIT.format(0)))) == []
    assert len(overwritten(instructions(loop(*loads, open_one, PRODUCT.format(156), WAIT.format(1))))) == 2
    assert len(overwritten(instructions(loop(*loads, PRODUCT.format(152), PRODUCT.format(156), WAIT.format(1))))) == 1


def test_code_is_followed_along_its_branches():
    load, product = "LDS.128 R152, [R12]", PRODUCT.format(152)
    straight = "".join(line(16 * at, text) for at, text in enumerate((product, load, "EXIT")))
    assert len(overwritten(instructions(straight))) == 1
    jumped = "".join(line(16 * at, text) for at, text in enumerate((
        product, "@P0 BRA 0x30", WAIT.format(0), load, "EXIT")))
    assert len(overwritten(instructions(jumped))) == 1, "the wait may be jumped over"
    never = "".join(line(16 * at, text) for at, text in enumerate((product, "BRA 0x30", load, WAIT.format(0), "EXIT")))
    assert overwritten(instructions(never)) == []
    uniform = loop(load, product).replace("@P0 BRA", "BRA.U UP0,")
    assert len(overwritten(instructions(uniform))) == 1
    with pytest.raises(ValueError, match="nowhere known"):
        overwritten(instructions(line(0, product) + line(16, "BRX R4 -0x40")))


def test_another_product_may_write_them_too():
    sums = "HGMMA.64x64x16.F32.BF16 R128, gdesc[UR4], gdesc[UR20], R128, gsb0"  # R128 to R159
    assert len(overwritten(instructions(loop(PRODUCT.format(152), sums, WAIT.format(0))))) == 1
    assert overwritten(instructions(loop(PRODUCT.format(160), sums, WAIT.format(0)))) == []


def test_the_compiler_makes_it_and_settled_prevents_it():
    signature = {"w_desc": "tensordesc<i8[64,128]>", "x_desc": "tensordesc<bf16[16,128]>", "out_ptr": "*fp32",
                 "steps": "i32"}
    careless, settled = compile_jobs([CompileJob.of(widened_product, signature, {"SETTLED": wait}, num_stages=4)
                                      for wait in (False, True)])
    assert isinstance(careless, KernelFacts), careless
    assert isinstance(settled, KernelFacts), settled
    assert careless.count("HGMMA") == settled.count("HGMMA") == 8
    assert careless.overwritten
    assert not settled.overwritten
