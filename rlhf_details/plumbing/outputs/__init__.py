"""
What a run leaves. Where is it?

    run               a run's folder, log, signals, end        trackers         terminal, files, TensorBoard, wandb
    checkpoint        what is saved and continued from         atomic           files that appear whole or not at all
    health            bad signs during a run                   verdict          what a run says at its end
    model_folder      the trained model, as others load it     hub              model card and upload
    evaluation        what evaluate.py reads and shows         statistics       means and rates with intervals, ROUGE-L
"""
