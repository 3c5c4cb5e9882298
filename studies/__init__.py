"""The studies that docs/, the examples' READMEs and benchmarks/RESULTS.md cite: `python -m studies.NAME --help`.

Nobody needs them to measure an example: that is what benchmarks/ is for, on whose modules they build.

guidance     which learning rate fits a larger global batch; its CSV file and picture are here
memory       what each remedy for "out of memory" saves
network      what a slow network costs, and what helps
sharding     what a process holds of a model with DDP, ZeRO and FSDP
zero_memory  the same at each of DeepSpeed's ZeRO stages
images       what reading image files costs
lora         what LoRA saves beside training all weights
saving       how often to save, by formulas and by a simulation of failures; its CSV file is here
step_model   how long a step takes on 1 to 1,000 nodes, by a model; step_model_check has it beside nodes of the lab
adapters     LoRA in a few lines, for memory and network
"""
